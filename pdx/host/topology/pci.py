"""PCI functions from sysfs: what they are, and which bridges are above them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pdx.host.topology.machine import PcieLink, PciPlace
from pdx.host.topology.sysfs import entries, read_int, read_number, real_path

__all__ = ["PciFunction", "owner", "read_pci"]

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PciFunction:
    """One function of a PCI device."""

    place: PciPlace
    vendor: int
    device: int
    #: Class and subclass: 0x0302 of 0x030200.
    class_code: int
    #: An SR-IOV function whose physical one is this.
    physical: str | None


def read_pci(root: Path, only_node: int | None) -> dict[str, PciFunction]:
    """All functions that sysfs shows, by address.

    Args:
        only_node: the machine's NUMA node where it has just one: then every device is on it.
    """
    found: dict[str, PciFunction] = {}
    for entry in entries(root / "sys/bus/pci/devices"):
        folder = real_path(entry)
        if folder is None or not _ADDRESS.fullmatch(entry.name):
            continue
        ids = [read_int(folder / name, 16) for name in ("vendor", "device", "class")]
        vendor, device, class_code = ids
        if vendor is None or device is None or class_code is None:
            continue
        physical = real_path(folder / "physfn")
        found[entry.name] = PciFunction(
            place=PciPlace(
                address=entry.name,
                bridges=_bridges(folder),
                numa_node=_numa_node(folder, only_node),
                link=_link(folder),
            ),
            vendor=vendor,
            device=device,
            class_code=class_code >> 8,
            physical=None if physical is None else physical.name,
        )
    return found


def owner(entry: Path) -> str | None:
    """The PCI function behind a class device (net, infiniband), through virtio and the like."""
    folder = real_path(entry)
    parts = () if folder is None else reversed(folder.parts)
    return next((part for part in parts if _ADDRESS.fullmatch(part)), None)


def _bridges(folder: Path) -> tuple[str, ...]:
    above: list[str] = []
    for part in reversed(folder.parts[:-1]):
        if _HOST_BRIDGE.fullmatch(part):
            return (part, *reversed(above))
        if not _ADDRESS.fullmatch(part):
            # A root complex that is no PCI host bridge: vmd, or VMBus below a virtual machine.
            return (part, *reversed(above)) if above else ()
        above.append(part)
    return ()


def _numa_node(folder: Path, only_node: int | None) -> int | None:
    for place in (folder, *folder.parents):
        if not _ADDRESS.fullmatch(place.name) and not _HOST_BRIDGE.fullmatch(place.name):
            break
        node = read_int(place / "numa_node")
        if node is not None and node >= 0:
            return node
    return only_node


def _link(folder: Path) -> PcieLink:
    width, max_width = (read_int(folder / f"{name}_link_width") for name in ("current", "max"))
    return PcieLink(
        gts=read_number(folder / "current_link_speed"),
        # 0 and 255 stand for a link that is down or unknown.
        width=width if width in range(1, 65) else None,
        max_gts=read_number(folder / "max_link_speed"),
        max_width=max_width if max_width in range(1, 65) else None,
    )
