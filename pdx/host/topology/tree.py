"""A machine as a tree to look at: sockets, NUMA nodes, PCI switches, devices. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdx.config.providers import Provider
from pdx.host.topology.distance import bridge_name
from pdx.host.topology.machine import Gpu, Machine, Nic, NumaNode

__all__ = ["Branch", "format_list", "machine_tree"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A socket, a NUMA node, or a PCI bridge below which there is more than one device."""

    title: str
    branches: tuple[Branch, ...]
    #: What hangs on it directly, or over bridges that it has for itself.
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]


def machine_tree(machine: Machine) -> tuple[Branch, ...]:
    """One branch per socket, and one for what cannot be placed.

    Left out: nodes of memory alone, interfaces of RDMA devices, virtual interfaces that are not in
    use.
    """
    rdma = {name for nic in machine.nics if nic.kind is not Provider.TCP for name in nic.interfaces}
    shown = [n for n in machine.nics if not (n.kind is Provider.TCP and n.name in rdma)]
    nodes = {node.idx: node for node in machine.numa_nodes if node.cpus}
    devices: dict[int | None, list[Gpu | Nic]] = defaultdict(list)
    every: list[Gpu | Nic] = [*machine.gpus, *shown]
    for each in every:
        if each.place is not None:
            idx = each.place.numa_node
            devices[idx if idx in nodes else None].append(each)
    sockets: dict[int | None, list[Branch]] = defaultdict(list)
    for node in nodes.values():
        sockets[node.socket].append(_node_branch(machine, node, devices[node.idx]))
    trees = [
        Branch(title=_socket_title(socket), branches=tuple(branches), gpus=(), nics=())
        for socket, branches in sockets.items()
    ]
    if devices[None]:
        trees.append(_branch("NUMA node not told", devices[None], 0))
    loose = [n for n in shown if n.place is None and n.problem is None]
    if loose:
        trees.append(Branch(title="no PCI device", branches=(), gpus=(), nics=tuple(loose)))
    return tuple(trees)


def _socket_title(socket: int | None) -> str:
    return "socket not told" if socket is None else f"socket {socket}"


def _node_branch(machine: Machine, node: NumaNode, devices: list[Gpu | Nic]) -> Branch:
    cores = [core for core in machine.cores if core.numa_node == node.idx]
    ours = [core for core in cores if machine.allowed_cpus.intersection(core.cpus)]
    title = f"NUMA node {node.idx}: {len(cores)} cores, CPUs {format_list(node.cpus)}"
    if len(ours) < len(cores):
        title += f", {len(ours)} cores ours"
    return _branch(title, devices, 0)


def _branch(title: str, devices: Sequence[Gpu | Nic], depth: int) -> Branch:
    """Devices that share the bridges above ``depth``."""
    below: dict[str | None, list[Gpu | Nic]] = defaultdict(list)
    for each in devices:
        bridges = each.place.bridges if each.place is not None else ()
        below[bridges[depth] if depth < len(bridges) else None].append(each)
    direct = below.pop(None, [])
    branches = []
    for several in below.values():
        if len(several) == 1:
            direct += several
        else:
            shared = _num_shared(several)
            bridge = bridge_name(_bridges(several[0])[:shared])
            branches.append(_branch(bridge, several, shared))
    return Branch(
        title=title,
        branches=tuple(branches),
        gpus=tuple(each for each in direct if isinstance(each, Gpu)),
        nics=tuple(each for each in direct if isinstance(each, Nic)),
    )


def _bridges(device: Gpu | Nic) -> tuple[str, ...]:
    return () if device.place is None else device.place.bridges


def _num_shared(devices: Sequence[Gpu | Nic]) -> int:
    """How many bridges all of them share from the top."""
    levels = zip(*map(_bridges, devices), strict=False)
    return next(
        (depth for depth, level in enumerate(levels) if len(set(level)) > 1),
        min(len(_bridges(each)) for each in devices),
    )


def format_list(numbers: Iterable[int]) -> str:
    """The kernel's list format: 0, 1, 2, 8 is "0-2,8"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
