"""Which core each fabric worker is pinned to, or why none is. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdx.host.topology.machine import Core, Machine
from pdx.host.topology.pairing import DomainGroup

__all__ = ["WorkerCore", "place_workers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCore:
    """Where the worker of a group runs."""

    #: None: it is not pinned.
    cpu: int | None
    why: str


def place_workers(machine: Machine, groups: tuple[DomainGroup, ...]) -> tuple[WorkerCore, ...]:
    """A core for each group's worker, near its first NIC.

    A worker spins while it waits, so it gets a core that no other worker shares, and only where
    enough are left: one for each GPU's rank and one for the primary. All groups are placed where
    the cores allow it, also those of GPUs that this process may not use: another process of the
    machine then comes to cores that are not ours.
    """
    if any(group.gpu is None for group in groups):
        why = "not pinned: without a GPU, the ranks compute on the cores"
        return tuple(WorkerCore(cpu=None, why=why) for _ in groups)
    free = _our_cores(machine)
    budget = len(free) if machine.cpu_quota is None else min(len(free), int(machine.cpu_quota))
    ours = [group for group in groups if group.gpu is not None and group.gpu.problem is None]
    for wanted in (groups, tuple(ours)):
        if wanted and budget >= _need(len(wanted)):
            return _place(machine, groups, wanted, free)
    why = _why_none(len(ours) or len(groups), budget, machine)
    return tuple(WorkerCore(cpu=None, why=why) for _ in groups)


def _need(num_workers: int) -> int:
    return 2 * num_workers + 1


def _our_cores(machine: Machine) -> list[Core]:
    """Cores with the hardware threads that this process may use."""
    allowed = machine.allowed_cpus
    ours = (replace(c, cpus=tuple(sorted(allowed.intersection(c.cpus)))) for c in machine.cores)
    return [core for core in ours if core.cpus]


def _place(
    machine: Machine,
    groups: tuple[DomainGroup, ...],
    wanted: tuple[DomainGroup, ...],
    free: list[Core],
) -> tuple[WorkerCore, ...]:
    placed = []
    for group in groups:
        if group not in wanted:
            placed.append(WorkerCore(cpu=None, why="not pinned: its GPU is not ours"))
            continue
        node = _node_of(group)
        # The last ones: the first core of a machine serves interrupts and the system.
        core = max(free, key=lambda core: (-_distance(machine, node, core), core.cpus[0]))
        free = [each for each in free if each is not core]
        placed.append(WorkerCore(cpu=core.cpus[0], why=_why(node, core)))
    return tuple(placed)


def _node_of(group: DomainGroup) -> int | None:
    """The NIC's NUMA node; the GPU's where the NIC does not tell."""
    nodes = [choice.nic.numa_node for choice in group.nics]
    nodes += [None if group.gpu is None else group.gpu.place.numa_node]
    return next((node for node in nodes if node is not None), None)


def _distance(machine: Machine, node: int | None, core: Core) -> int:
    """The firmware's, 10 for one node; above all of these where it is not told."""
    if node is None or node == core.numa_node:
        return 10
    told = next((dict(each.distances) for each in machine.numa_nodes if each.idx == node), {})
    return 1000 if core.numa_node is None else told.get(core.numa_node, 1000)


def _why(node: int | None, core: Core) -> str:
    if node is None:
        return "any core: the NIC's NUMA node is not told"
    if node == core.numa_node:
        return f"on the NIC's NUMA node ({node})"
    return f"no core is left on the NIC's NUMA node ({node})"


def _why_none(num_workers: int, budget: int, machine: Machine) -> str:
    limit = "" if machine.cpu_quota is None else f" (the cgroup grants {machine.cpu_quota:g} CPUs)"
    return (
        f"not pinned: {num_workers} ranks, as many workers and the primary need "
        f"{_need(num_workers)} cores, {budget} are there{limit}"
    )
