"""Addresses as people write them, and as nodes print them."""

from __future__ import annotations

import socket

import pytest

from pdx.errors import ConfigError
from pdx.messenger.control import Address, parse_address, reachable


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7001", "127.0.0.1", 7001),
        ("[::1]:7001", "::1", 7001),
        ("localhost:0", "localhost", 0),
        (":7001", "127.0.0.1", 7001),
        ("7001", "127.0.0.1", 7001),
    ],
)
def test_addresses_are_read_in_every_usual_form(text: str, host: str, port: int) -> None:
    assert parse_address(text) == Address(host=host, port=port)


@pytest.mark.parametrize("text", ["", "host", "::1:7001", "host:port", "host:70000", "host:-1"])
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        parse_address(text)


def test_printed_address_can_be_read_back() -> None:
    for address in (Address(host="::1", port=7001), Address(host="10.0.0.1", port=1)):
        assert parse_address(str(address)) == address


def test_wildcard_is_announced_by_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert reachable(Address(host="0.0.0.0", port=7)) == Address(host="localhost", port=7)
    assert reachable(Address(host="127.0.0.1", port=7)) == Address(host="127.0.0.1", port=7)
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert reachable(Address(host="::", port=7)) == Address(host="::", port=7)
