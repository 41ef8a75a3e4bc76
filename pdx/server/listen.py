"""The listening socket, bound before the frontend says that it is ready."""

from __future__ import annotations

import errno
import socket
from typing import Any

from pdx.errors import ConfigError

__all__ = ["BACKLOG", "open_listener"]

#: Connections that the kernel holds until they are accepted.
BACKLOG = 2048
_MAX_PORT = 65535


def open_listener(host: str, port: int) -> socket.socket:
    """Bind and listen on an IPv4 or IPv6 address (with or without brackets), a name, or "" for all
    addresses.

    A name with several addresses gets the first that this host has.

    Raises:
        ConfigError: no such address here, or it is in use; the message says what was tried.
    """
    if not 0 <= port <= _MAX_PORT:
        raise ConfigError(f"cannot listen on port {port}: ports end at {_MAX_PORT}")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    tried = []
    for family, address in _resolve(bare, port) if bare else _any_address(port):
        both = not bare and family == socket.AF_INET6
        try:
            listener = socket.create_server(
                address, family=family, backlog=BACKLOG, dualstack_ipv6=both
            )
        except OSError as error:
            tried.append(f"{address[0]} port {port}: {_reason(error)}")
            continue
        # Accepted sockets inherit it. asyncio sets it only on sockets made with IPPROTO_TCP spelled
        # out, which these are not; without it each token waits 40 ms for the client's delayed ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    raise ConfigError(
        f"cannot listen on {host or 'any address'}: {'; '.join(tried)}",
        hint="port 0 picks a free port",
    )


def _any_address(port: int) -> list[tuple[int, Any]]:
    """One socket for both families, where the kernel has IPv6."""
    both = [(socket.AF_INET6, ("::", port))] if socket.has_dualstack_ipv6() else []
    return [*both, (socket.AF_INET, ("0.0.0.0", port))]


def _resolve(host: str, port: int) -> list[tuple[int, Any]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host!r}: {error}") from error
    return [(family, address) for family, _, _, _, address in found]


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the address is already in use"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this host has no such address"
    return error.strerror or str(error)
