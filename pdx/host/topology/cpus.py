"""NUMA nodes, cores and hardware threads, and which of them this process may use."""

from __future__ import annotations

from pathlib import Path

from pdx.host.topology.machine import Core, NumaNode
from pdx.host.topology.sysfs import entries, parse_list, read_int, read_text

__all__ = ["read_allowed_cpus", "read_cores", "read_cpu_quota", "read_numa_nodes"]

_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"


def read_numa_nodes(root: Path) -> tuple[NumaNode, ...]:
    """The nodes by number; none where the kernel or the container does not show them."""
    online = _online(root)
    folders = {
        int(entry.name[4:]): entry
        for entry in entries(root / _NODES)
        if entry.name.startswith("node") and entry.name[4:].isdecimal()
    }
    return tuple(_node(root, idx, folders, online) for idx in sorted(folders))


def _node(root: Path, idx: int, folders: dict[int, Path], online: set[int]) -> NumaNode:
    cpus = tuple(c for c in parse_list(read_text(folders[idx] / "cpulist")) if c in online)
    numbers = (read_text(folders[idx] / "distance") or "").split()
    # One number per node that is online, in order.
    known = len(numbers) == len(folders) and all(each.isdecimal() for each in numbers)
    return NumaNode(
        idx=idx,
        socket=_socket(root, cpus[0]) if cpus else None,
        cpus=cpus,
        distances=tuple(zip(sorted(folders), map(int, numbers), strict=True)) if known else (),
    )


def read_cores(root: Path, nodes: tuple[NumaNode, ...]) -> tuple[Core, ...]:
    """All cores with a hardware thread that is online, by their first one."""
    online = _online(root)
    node_of = {cpu: node.idx for node in nodes for cpu in node.cpus}
    cores: dict[int, Core] = {}
    for cpu in sorted(online):
        siblings = _siblings(root, cpu) & online | {cpu}
        first = min(siblings)
        cores.setdefault(
            first,
            Core(
                cpus=tuple(sorted(siblings)),
                numa_node=node_of.get(first),
                socket=_socket(root, first),
            ),
        )
    return tuple(cores.values())


def read_allowed_cpus(root: Path) -> frozenset[int]:
    """This process's affinity, which also holds a container's cpuset; all, if it is not told."""
    for line in (read_text(root / "proc/self/status") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "Cpus_allowed_list":
            return frozenset(parse_list(value))
    return frozenset(_online(root))


def read_cpu_quota(root: Path) -> float | None:
    """The cgroup's quota in CPUs (version 2, as seen from inside a container)."""
    words = (read_text(root / "sys/fs/cgroup/cpu.max") or "").split()
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
        return int(words[0]) / int(words[1])
    return None


def _online(root: Path) -> set[int]:
    listed = parse_list(read_text(root / _CPUS / "online"))
    if listed:
        return set(listed)
    names = (entry.name for entry in entries(root / _CPUS))
    return {int(name[3:]) for name in names if name.startswith("cpu") and name[3:].isdecimal()}


def _siblings(root: Path, cpu: int) -> set[int]:
    folder = root / _CPUS / f"cpu{cpu}" / "topology"
    # The newer name first.
    text = read_text(folder / "core_cpus_list") or read_text(folder / "thread_siblings_list")
    return set(parse_list(text))


def _socket(root: Path, cpu: int) -> int | None:
    socket = read_int(root / _CPUS / f"cpu{cpu}" / "topology/physical_package_id")
    return socket if socket is not None and socket >= 0 else None
