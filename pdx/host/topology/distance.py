"""How far apart two PCI devices are. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdx.host.topology.machine import NumaNode, PciPlace

__all__ = ["Distance", "Way", "bridge_name", "measure"]


class Distance(enum.Enum):
    """Classes of distance, nearest first."""

    SWITCH = "same PCI switch"
    HOST_BRIDGE = "same host bridge"
    NUMA = "same NUMA node"
    OTHER_NUMA = "other NUMA node"
    UNKNOWN = "unknown"

    @property
    def rank(self) -> int:
        """0 is nearest."""
        return list(Distance).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The way between two devices."""

    distance: Distance
    #: Orders ways of one class: PCI bridges on the way, or the firmware's distance of the nodes.
    length: int
    #: In words.
    why: str


def measure(a: PciPlace | None, b: PciPlace | None, nodes: Mapping[int, NumaNode]) -> Way:
    """The way between two devices; None stands for one that has no place on the bus."""
    if a is None or b is None:
        return Way(distance=Distance.UNKNOWN, length=0, why="it has no place on the PCI bus")
    shared = 0
    for ours, theirs in zip(a.bridges, b.bridges, strict=False):
        if ours != theirs:
            break
        shared += 1
    hops = len(a.bridges) + len(b.bridges) - 2 * shared
    if shared >= 2:
        # Whether a switch or a plain bridge, traffic need not pass the host bridge.
        why = f"below the same {bridge_name(a.bridges[:shared])}"
        return Way(distance=Distance.SWITCH, length=hops, why=why)
    if shared == 1:
        why = f"on the same {bridge_name(a.bridges[:shared])}"
        return Way(distance=Distance.HOST_BRIDGE, length=hops, why=why)
    return _over_numa(a.numa_node, b.numa_node, hops, nodes)


def bridge_name(bridges: Sequence[str]) -> str:
    """What the last of some bridges is, from the top down, and its address."""
    kind = ("host bridge", "root port", "PCI switch")[min(len(bridges), 3) - 1]
    return f"{kind} {bridges[-1]}"


def _over_numa(a: int | None, b: int | None, hops: int, nodes: Mapping[int, NumaNode]) -> Way:
    if a is None or b is None:
        why = "a NUMA node is not told, and they share no PCI bridge"
        return Way(distance=Distance.UNKNOWN, length=0, why=why)
    if a == b:
        why = f"on the same NUMA node ({a}), without a common PCI bridge"
        return Way(distance=Distance.NUMA, length=hops, why=why)
    told = dict(nodes[a].distances) if a in nodes else {}
    why = f"on another NUMA node ({b}, not {a})"
    return Way(distance=Distance.OTHER_NUMA, length=told.get(b, 0), why=why)
