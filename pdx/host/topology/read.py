"""Reads a machine: all parts, from one root folder that holds sys, proc and dev."""

from __future__ import annotations

from pathlib import Path

from pdx.host.topology.cpus import (
    read_allowed_cpus,
    read_cores,
    read_cpu_quota,
    read_numa_nodes,
)
from pdx.host.topology.gpus import read_gpus
from pdx.host.topology.machine import Core, Gpu, Machine, Nic, NumaNode
from pdx.host.topology.nics import read_default_interface, read_nics
from pdx.host.topology.pci import read_pci

__all__ = ["read_machine"]


def read_machine(root: Path = Path("/")) -> Machine:
    """What the machine consists of. Never raises: what is hidden becomes a note.

    Args:
        root: holds sys, proc and dev; another one than / for machines that were written down.
    """
    nodes = read_numa_nodes(root)
    functions = read_pci(root, nodes[0].idx if len(nodes) == 1 else None)
    gpus = read_gpus(root, functions)
    nics = read_nics(root, functions)
    cores = read_cores(root, nodes)
    return Machine(
        gpus=gpus,
        nics=nics,
        numa_nodes=nodes,
        cores=cores,
        allowed_cpus=read_allowed_cpus(root),
        cpu_quota=read_cpu_quota(root),
        default_interface=read_default_interface(root),
        notes=_notes(nodes, bool(functions), gpus, nics, cores),
    )


def _notes(
    nodes: tuple[NumaNode, ...],
    sees_pci: bool,
    gpus: tuple[Gpu, ...],
    nics: tuple[Nic, ...],
    cores: tuple[Core, ...],
) -> tuple[str, ...]:
    notes = []
    if not sees_pci:
        notes.append("no PCI device is visible: what lies near what is unknown")
    if not nodes:
        notes.append("NUMA nodes are not visible: distances are known by PCI paths alone")
    if not cores:
        notes.append("CPUs are not visible: no worker is pinned")
    places = [gpu.place for gpu in gpus] + [nic.place for nic in nics if nic.place is not None]
    lost = sorted({place.address for place in places if nodes and place.numa_node is None})
    if lost:
        notes.append(f"the NUMA node is not told (-1) for {', '.join(lost)}")
    links = {place.address: place.link for place in places}
    notes += [
        f"{address} runs with {link.width} of its {link.max_width} PCIe lanes"
        for address, link in sorted(links.items())
        if link.width is not None and link.max_width is not None and link.width < link.max_width
    ]
    return tuple(notes)
