"""NVIDIA GPUs: those on the PCI bus, and what the driver says of them in /proc."""

from __future__ import annotations

from pathlib import Path

from pdx.host.topology.machine import Gpu, PcieLink, PciPlace
from pdx.host.topology.pci import PciFunction
from pdx.host.topology.sysfs import entries, read_text

__all__ = ["read_gpus"]

_NVIDIA = 0x10DE
#: VGA and 3D controllers. NVSwitches are bridges, and a GPU's sound function is audio.
_DISPLAY = (0x0300, 0x0302)
_DRIVER = "proc/driver/nvidia/gpus"


def read_gpus(root: Path, functions: dict[str, PciFunction]) -> tuple[Gpu, ...]:
    """All NVIDIA GPUs, by address; also those that are hidden from this process."""
    # The container toolkit shows here only the GPUs that the container was given.
    told = {entry.name.lower(): _information(entry) for entry in entries(root / _DRIVER)}
    places = {
        address: each.place
        for address, each in functions.items()
        if each.vendor == _NVIDIA and each.class_code in _DISPLAY
    }
    # A sandbox may hide the PCI bus and still offer GPUs.
    nowhere = PcieLink(gts=None, width=None, max_gts=None, max_width=None)
    for address in told.keys() - places.keys():
        places[address] = PciPlace(address=address, bridges=(), numa_node=None, link=nowhere)
    return tuple(_gpu(root, place, told) for _, place in sorted(places.items()))


def _gpu(root: Path, place: PciPlace, told: dict[str, dict[str, str]]) -> Gpu:
    facts = told.get(place.address, {})
    minor = facts.get("Device Minor", "")
    return Gpu(
        place=place,
        model=facts.get("Model"),
        minor=int(minor) if minor.isdecimal() else None,
        problem=_problem(root, place.address, told, minor),
    )


def _problem(root: Path, address: str, told: dict[str, dict[str, str]], minor: str) -> str | None:
    if not told:
        return "no NVIDIA driver is visible here"
    if address not in told:
        return "hidden from this process"
    if minor and not (root / f"dev/nvidia{minor}").exists():
        return f"/dev/nvidia{minor} is missing"
    return None


def _information(folder: Path) -> dict[str, str]:
    lines = (read_text(folder / "information") or "").splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}
