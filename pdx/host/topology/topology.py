"""The whole answer: the machine, the groups, the workers' cores. Thin over pure parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdx.host.topology.machine import Machine, Nic
from pdx.host.topology.pairing import DomainGroup, pair
from pdx.host.topology.read import read_machine
from pdx.host.topology.workers import WorkerCore, place_workers

__all__ = ["Topology", "plan_topology", "read_topology"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A machine, and what pdx makes of it."""

    machine: Machine
    #: One per GPU by PCI address, or one for host memory.
    groups: tuple[DomainGroup, ...]
    #: The worker of each group.
    workers: tuple[WorkerCore, ...]
    #: NICs that serve nobody, each with its reason.
    left_out: tuple[tuple[Nic, str], ...]


def plan_topology(machine: Machine) -> Topology:
    """Which NICs and which core serve which GPU."""
    pairing = pair(machine)
    return Topology(
        machine=machine,
        groups=pairing.groups,
        workers=place_workers(machine, pairing.groups),
        left_out=pairing.left_out,
    )


def read_topology(root: Path = Path("/")) -> Topology:
    """Read this machine (or one that was written down below ``root``). Needs no rights, never
    raises, starts nothing.
    """
    return plan_topology(read_machine(root))
