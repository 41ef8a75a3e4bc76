"""URLs that a serving command prints can be opened."""

from __future__ import annotations

import pytest

from pdx.cli.serving import url_of
from pdx.messenger.control import Address


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/v1"),
        ("10.1.2.3", "http://10.1.2.3:8000/v1"),
        ("::1", "http://[::1]:8000/v1"),
        ("fd00::7", "http://[fd00::7]:8000/v1"),
        ("fe80::1%eth0", "http://[fe80::1%25eth0]:8000/v1"),
        ("0.0.0.0", "http://127.0.0.1:8000/v1"),
        ("::", "http://[::1]:8000/v1"),
        ("", "http://127.0.0.1:8000/v1"),
        ("example.org", "http://example.org:8000/v1"),
    ],
)
def test_a_url_is_one_that_a_client_can_open(host: str, url: str) -> None:
    assert url_of(Address(host=host, port=8000)) == url
