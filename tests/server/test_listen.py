from __future__ import annotations

import socket

import pytest

from pdx.server.listen import open_listener


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", ""])
def test_accepted_connections_send_each_token_at_once(host: str) -> None:
    with (
        open_listener(host, 0) as listener,
        socket.create_connection((host or "127.0.0.1", listener.getsockname()[1])),
    ):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
