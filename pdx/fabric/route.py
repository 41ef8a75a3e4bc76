"""The way to a peer: which of this host's addresses and interfaces it would see. Asks the kernel's
routing table; sends nothing.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from pdx.errors import FabricError

__all__ = ["Route", "route_to"]

_SIOCGIFADDR = 0x8915
#: Discard; nothing is sent to it.
_PORT = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """From us to a peer."""

    peer_address: str
    #: Ours, as the peer sees it.
    local_address: str
    #: The interface with that address; None: not found.
    interface: str | None

    @property
    def is_loopback(self) -> bool:
        """Whether the peer's address is a loopback one, so that the peer is on this host."""
        return ipaddress.ip_address(self.peer_address).is_loopback

    @property
    def is_own(self) -> bool:
        """Whether the peer's address is one of this host's."""
        return self.peer_address == self.local_address


def route_to(host: str) -> Route:
    """Find the way to a name or an address.

    Raises:
        FabricError: it cannot be resolved, or there is no route.
    """
    try:
        found = socket.getaddrinfo(host, _PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise FabricError(f"{host!r} cannot be resolved: {error}") from error
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
        try:
            probe.connect(address)
        except OSError as error:
            raise FabricError(f"there is no route to {host!r}: {error.strerror}") from error
        local = str(probe.getsockname()[0]).partition("%")[0]
    peer = str(address[0]).partition("%")[0]
    interface = _ipv6_interface(local) if family == socket.AF_INET6 else _ipv4_interface(local)
    return Route(peer_address=peer, local_address=local, interface=interface)


def _ipv4_interface(address: str) -> str | None:
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
            except OSError:  # no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _ipv6_interface(address: str) -> str | None:
    wanted = ipaddress.ip_address(address).packed.hex()
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[-1] for line in lines if line.startswith(wanted)), None)
