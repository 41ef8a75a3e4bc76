"""The address of an RDMA device: the one of its RoCE version 2 GIDs that peers can route to. Reads
sysfs; sends nothing.

Verbs domains are found by an IP address of the device's interface. A device has several GIDs: of
RoCE version 1, which stays within one network segment, and version 2, each for the link-local and
for the routed addresses.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path

from pdx.errors import FabricError

__all__ = ["roce_address"]


def roce_address(device: str, root: Path = Path("/")) -> str:
    """The IPv4 address of a device such as mlx5_0, else its routed IPv6 address.

    Raises:
        FabricError: there is no such device, it is no Ethernet device, or no GID has an address
            that peers could route to.
    """
    folder = root / "sys/class/infiniband" / device
    ports = sorted(folder.glob("ports/*"), key=lambda port: port.name)
    if not ports:
        raise FabricError(f"there is no RDMA device {device}")
    if all(_read(port / "link_layer") != "Ethernet" for port in ports):
        raise FabricError(
            f"{device} is an InfiniBand device, whose GIDs are no addresses",
            hint="name the address of its IPoIB interface",
        )
    found = [address for port in ports for address in _version_2(port)]
    best = min(found, key=lambda address: address.version, default=None)
    if best is None:
        raise FabricError(
            f"{device} has no RoCE version 2 GID with an address that peers can route to",
            hint="give its network interface an IP address",
        )
    return str(best)


def _version_2(port: Path) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    addresses: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    for gid in sorted(port.glob("gids/*"), key=lambda entry: int(entry.name)):
        if _read(port / "gid_attrs" / "types" / gid.name) != "RoCE v2":
            continue
        try:
            address = ipaddress.IPv6Address(_read(gid))
        except ValueError:
            continue
        if not address.is_link_local and not address.is_unspecified:
            addresses.append(address.ipv4_mapped or address)
    return addresses


def _read(path: Path) -> str:
    # Empty entries of the GID table have no type: reading it is an error.
    try:
        return path.read_text().strip()
    except OSError:
        return ""
