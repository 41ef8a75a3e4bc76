"""What a topology's parts are called where people read it. Pure."""

from __future__ import annotations

from collections import defaultdict

from pdx.host.topology import Gpu, Nic, Topology

__all__ = ["Labels"]


class Labels:
    """Names and facts of one topology's devices; GPUs are numbered in the order of addresses."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._number = {gpu.place.address: n for n, gpu in enumerate(topology.machine.gpus)}
        self._left_out = {nic.name: why for nic, why in topology.left_out}
        self._served: dict[str, list[str]] = defaultdict(list)
        for group in topology.groups:
            for choice in group.nics:
                served = "host memory" if group.gpu is None else self.short_gpu(group.gpu)
                self._served[choice.nic.name].append(served)

    def short_gpu(self, gpu: Gpu) -> str:
        """Such as "GPU 3"."""
        return f"GPU {self._number[gpu.place.address]}"

    def gpu(self, gpu: Gpu) -> str:
        """One line with all that matters."""
        text = " ".join(
            part for part in (self.short_gpu(gpu), gpu.place.address, gpu.model) if part
        )
        return text if gpu.problem is None else f"{text} ({gpu.problem})"

    def nic(self, nic: Nic) -> str:
        """One line with all that matters."""
        interfaces = [name for name in nic.interfaces if name != nic.name]
        parts = [
            nic.address if nic.address != nic.name else None,
            nic.model,
            rate(nic),
            nic.link_layer if nic.link_layer not in (None, "Unspecified", "loopback") else None,
            f"(net {', '.join(interfaces)})" if interfaces else None,
        ]
        text = " ".join(["NIC", nic.name, *(part for part in parts if part)])
        if self.serves(nic):
            return f"{text} -> {', '.join(self._served[nic.name])}"
        reason = self._left_out.get(nic.name)
        return text if reason is None else f"{text} - {reason}"

    def serves(self, nic: Nic) -> bool:
        """Whether it was chosen for something."""
        return nic.name in self._served

    def summary(self) -> list[tuple[str, list[str]]]:
        """Titles with lines: who is served by what and why, and what is unknown."""
        topology = self._topology
        groups = []
        for group, worker in zip(topology.groups, topology.workers, strict=True):
            name = "host memory" if group.gpu is None else self.short_gpu(group.gpu)
            nics = ", ".join(choice.nic.name for choice in group.nics) or "no NIC"
            core = worker.why if worker.cpu is None else f"CPU {worker.cpu}, {worker.why}"
            groups += [f"{name}: {nics}", f"  {group.why}", f"  worker: {core}"]
        blocks = [("What serves what, and why", groups)]
        memory_only = [node.idx for node in topology.machine.numa_nodes if not node.cpus]
        notes = list(topology.machine.notes)
        if memory_only:
            notes.append(f"NUMA nodes of memory alone: {', '.join(map(str, memory_only))}")
        if notes:
            blocks.append(("Notes", notes))
        return blocks


def rate(nic: Nic) -> str | None:
    """The speed in words."""
    return None if nic.rate_gbps is None else f"{nic.rate_gbps:g} Gb/s"
