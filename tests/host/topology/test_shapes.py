"""Machines of real shapes, written down in shapes/: what is paired, with which reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdx.config.providers import Provider
from pdx.host.topology import Distance, Topology, read_topology
from tests.host.topology.machines import NAMES, expand

_SWITCHES = {
    "dgx-h100": [[f"mlx5_{n}"] for n in (0, 3, 4, 5, 6, 9, 10, 11)],
    "p5": [
        [f"rdmap{first + n}s0" for n in range(4)]
        for first in (79, 96, 113, 130, 147, 164, 181, 198)
    ],
    "p5en": [
        [f"rdmap{first + n}s0" for n in range(2)]
        for first in (83, 85, 115, 117, 147, 149, 179, 181)
    ],
}


def shape(name: str, folder: Path) -> Topology:
    return read_topology(expand(name, folder))


def nic_names(topology: Topology) -> list[list[str]]:
    return [[choice.nic.name for choice in group.nics] for group in topology.groups]


def distances(topology: Topology) -> set[Distance]:
    return {choice.distance for group in topology.groups for choice in group.nics}


@pytest.mark.parametrize("name", sorted(_SWITCHES))
def test_each_gpu_gets_the_nics_of_its_own_switch(name: str, tmp_path: Path) -> None:
    topology = shape(name, tmp_path)
    assert nic_names(topology) == _SWITCHES[name]
    assert distances(topology) == {Distance.SWITCH}


def test_slower_storage_nics_are_left_out(tmp_path: Path) -> None:
    left_out = {nic.name: why for nic, why in shape("dgx-h100", tmp_path).left_out}
    assert set(left_out) == {"mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8", "eno3", "lo"}
    assert left_out["mlx5_1"] == "200 Gb/s, the chosen ones 400 Gb/s"


def test_two_gpus_share_the_nic_of_their_host_bridge_where_there_are_fewer(tmp_path: Path) -> None:
    topology = shape("p4d", tmp_path)
    wanted = [f"rdmap{bus}s27" for bus in (16, 32, 144, 160)]
    assert nic_names(topology) == [[name] for name in wanted for _ in range(2)]
    assert distances(topology) == {Distance.HOST_BRIDGE}
    assert "shared with GPU 0000:10:1d.0" in topology.groups[0].why


def test_grace_hopper_pairs_by_numa_node(tmp_path: Path) -> None:
    topology = shape("gh200", tmp_path)
    assert nic_names(topology) == [["mlx5_0"]]
    assert distances(topology) == {Distance.NUMA}
    assert [node.idx for node in topology.machine.numa_nodes if not node.cpus] == [1]
    left_out = {nic.name: why for nic, why in topology.left_out}
    assert left_out["mlx5_1"] == "it speaks Ethernet, the chosen ones InfiniBand"


def test_without_a_switch_each_numa_node_keeps_its_nics(tmp_path: Path) -> None:
    topology = shape("gb200", tmp_path)
    assert nic_names(topology) == [["mlx5_0"], ["mlx5_1"], ["mlx5_2"], ["mlx5_3"]]
    assert distances(topology) == {Distance.NUMA}


def test_laptop_uses_tcp_over_the_default_interface(tmp_path: Path) -> None:
    topology = shape("laptop", tmp_path)
    (group,) = topology.groups
    assert group.gpu is None
    assert [(c.nic.name, c.nic.kind) for c in group.nics] == [("wlp0s20f3", Provider.TCP)]
    assert topology.workers[0].cpu is None
    left_out = {nic.name: why for nic, why in topology.left_out}
    assert left_out["enp0s31f6"] == "its link is down"


def test_workstation_without_rdma_serves_its_gpu_over_tcp(tmp_path: Path) -> None:
    topology = shape("workstation", tmp_path)
    assert nic_names(topology) == [["enp5s0"]]
    # sysfs says -1, but there is just one node.
    assert topology.machine.gpus[0].place.numa_node == 0
    assert topology.machine.notes == ()


def test_flat_machine_pairs_in_order_and_says_what_it_does_not_know(tmp_path: Path) -> None:
    topology = shape("vm-flat", tmp_path)
    assert nic_names(topology) == [[f"mlx5_ib{n}"] for n in range(8)]
    assert distances(topology) == {Distance.UNKNOWN}
    assert any("0001:00:00.0" in note and "-1" in note for note in topology.machine.notes)


def test_container_gets_its_own_gpus_nics_and_cores(tmp_path: Path) -> None:
    topology = shape("dgx-container", tmp_path)
    assert nic_names(topology) == [[], [], ["mlx5_4"], ["mlx5_5"], [], [], [], []]
    assert [worker.cpu for worker in topology.workers if worker.cpu is not None] == [45, 44]


@pytest.mark.parametrize("name", ["dgx-h100", "p5", "p5en", "p4d", "gb200"])
def test_workers_get_cores_of_their_own_on_the_nics_node(name: str, tmp_path: Path) -> None:
    topology = shape(name, tmp_path)
    core_of = {cpu: core for core in topology.machine.cores for cpu in core.cpus}
    cpus = [worker.cpu for worker in topology.workers]
    cores = [core_of[cpu] for cpu in cpus if cpu is not None]
    assert len(cores) == len(topology.groups)
    assert len({core.cpus for core in cores}) == len(cores)
    nodes = [group.nics[0].nic.numa_node for group in topology.groups]
    assert [core.numa_node for core in cores] == nodes


_PARTS = (
    "sys/bus",
    "sys/class/net",
    "sys/class/infiniband",
    "sys/class/infiniband_verbs",
    "sys/devices/system/node",
    "sys/devices/system/cpu",
    "sys/devices/system",
    "sys/devices",
    "proc",
    "dev",
    "sys",
)


@pytest.mark.parametrize("name", NAMES)
def test_hidden_parts_never_raise(name: str, tmp_path: Path) -> None:
    root = expand(name, tmp_path / "whole")
    for part in _PARTS:
        if not (root / part).exists():
            continue
        (root / part).rename(tmp_path / "hidden")
        topology = read_topology(root)
        assert len(topology.groups) == len(topology.workers) == max(len(topology.machine.gpus), 1)
        (tmp_path / "hidden").rename(root / part)


@pytest.mark.parametrize("content", ["", "nonsense", "-", "999999999999999999999", "\x00\xff"])
def test_files_of_nonsense_never_raise(content: str, tmp_path: Path) -> None:
    root = expand("gh200", tmp_path)
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            if not path.is_symlink():
                path.write_text(content)
    read_topology(root)


def test_empty_machine_says_that_nothing_is_visible(tmp_path: Path) -> None:
    topology = read_topology(tmp_path)
    assert topology.groups[0].nics == ()
    assert "shm" in topology.groups[0].why
    assert len(topology.machine.notes) == 3


def test_this_machine_can_be_read() -> None:
    topology = read_topology()
    assert topology.machine.allowed_cpus == os.sched_getaffinity(0)
    assert any(nic.link_layer == "loopback" for nic in topology.machine.nics)
