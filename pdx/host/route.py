"""The way to a peer: which of this host's addresses and interfaces it would see. Asks the kernel's
routing table; sends nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from pdx.errors import FabricError
from pdx.host.addresses import host_addresses

__all__ = ["Route", "route_to"]

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
    ours = ipaddress.ip_address(local)
    named = (each.interface for each in host_addresses() if each.address == ours)
    # All of 127.0.0.0/8 is the loopback interface's, which has one of these addresses.
    interface = "lo" if ours.is_loopback else next(named, None)
    return Route(peer_address=peer, local_address=local, interface=interface)
