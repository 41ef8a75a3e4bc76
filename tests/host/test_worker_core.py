"""The core of a node's fabric worker: asked for, the topology's, or none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdx.errors import ConfigError
from pdx.fabric import FabricOptions, open_fabric
from pdx.host.topology import Topology, read_topology
from pdx.host.worker_core import worker_core
from tests.host.topology.machines import expand

OURS = min(os.sched_getaffinity(0))


def _never() -> Topology:
    raise AssertionError("the machine is not asked")


def test_beside_ranks_on_the_cores_none_is_taken_unless_asked() -> None:
    assert worker_core("auto", device="cpu", read=_never) is None
    assert worker_core("none", device="cuda", read=_never) is None
    assert worker_core(str(OURS), device="cpu", read=_never) == OURS


def test_beside_gpus_it_is_the_topologys(tmp_path: Path) -> None:
    topology = read_topology(expand("dgx-h100", tmp_path))
    assert topology.workers[0].cpu is not None
    assert worker_core("auto", device="cuda", read=lambda: topology) == topology.workers[0].cpu


@pytest.mark.parametrize("wanted", ["", "-1", "1.5", "all", "99999"])
def test_what_is_no_core_of_ours_is_refused(wanted: str) -> None:
    with pytest.raises(ConfigError, match="--fabric-core"):
        worker_core(wanted, device="cpu")


def test_the_worker_runs_on_its_core() -> None:
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    fabric = open_fabric(provider="tcp", options=FabricOptions(cpu=OURS))
    try:
        started = set(tasks.iterdir()) - before
        workers = [task for task in started if (task / "comm").read_text() == "pdx-fabric\n"]
        assert [os.sched_getaffinity(int(task.name)) for task in workers] == [{OURS}]
    finally:
        fabric.close()
