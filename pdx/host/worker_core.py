"""Which core a node pins its fabric worker to: what the user asked for, else the topology's choice.
Reads sysfs once, at the start.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from pdx.errors import ConfigError
from pdx.host.topology import Topology, read_topology

__all__ = ["worker_core"]


def worker_core(
    wanted: str, *, device: str, read: Callable[[], Topology] = read_topology
) -> int | None:
    """A core's number; None leaves the worker to the kernel.

    Args:
        wanted: a number, "none", or "auto": none beside ranks that compute on the cores, else the
            topology's choice, which is none where no core is to spare.
        device: the ranks'.
        read: how to learn the topology.

    Raises:
        ConfigError: it is none of these, or a core that this process may not use.
    """
    if wanted == "none":
        return None
    if wanted == "auto":
        if device == "cpu":
            return None
        placed = (worker.cpu for worker in read().workers)
        return next((cpu for cpu in placed if cpu is not None), None)
    if not wanted.isdecimal():
        raise ConfigError(f"--fabric-core {wanted}: write a core's number, auto or none")
    allowed = os.sched_getaffinity(0)
    if int(wanted) not in allowed:
        raise ConfigError(
            f"--fabric-core {wanted}: this process may use {_ranges(sorted(allowed))}"
        )
    return int(wanted)


def _ranges(cpus: list[int]) -> str:
    """Such as 0-3,8."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
