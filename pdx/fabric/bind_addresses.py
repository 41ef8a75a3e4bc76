"""The addresses that a fabric is bound to, checked before libfabric sees them: it would say what is
wrong only when the first link is opened.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from pdx.errors import FabricError
from pdx.fabric.interface import MAX_DOMAINS
from pdx.host.addresses import host_addresses

__all__ = ["bindable_address", "bindable_addresses", "check_number"]

_HINT = "name an address of one network interface of this host (--fabric-bind)"


def bindable_addresses(hosts: Sequence[str]) -> tuple[str, ...]:
    """The numeric addresses of these names, of which each is this host's.

    Raises:
        FabricError: one cannot be bound, two are the same, or there are too many.
    """
    addresses = tuple(map(bindable_address, hosts))
    check_number(addresses)
    return addresses


def check_number(addresses: Sequence[str]) -> None:
    """
    Raises:
        FabricError: two are the same, or there are too many.
    """
    if len(addresses) > MAX_DOMAINS or len(set(addresses)) != len(addresses):
        raise FabricError(
            f"a fabric takes up to {MAX_DOMAINS} different addresses, not {', '.join(addresses)}",
            hint="give each address once: --fabric-bind",
        )


def bindable_address(host: str) -> str:
    """The numeric address of a name.

    Raises:
        FabricError: it has none, or this host has not that address; those that it has are named.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise FabricError(
            f"the fabric's address {host!r} cannot be resolved: {error}", hint=_HINT
        ) from error
    numeric = str(found[0][4][0])
    address = ipaddress.ip_address(numeric.partition("%")[0])
    if address.is_unspecified:
        raise FabricError(
            f"the fabric cannot be bound to {host!r}: peers need one address that they can reach",
            hint=_HINT,
        )
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((numeric, 0))
        except OSError as error:
            own = ", ".join(f"{each.address} ({each.interface})" for each in host_addresses())
            raise FabricError(
                f"the fabric cannot be bound to {host!r}, which is no address of this host "
                f"({error.strerror}); it has {own}",
                hint=_HINT,
            ) from error
    return numeric
