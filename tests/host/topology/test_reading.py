"""Single facts of sysfs: links, ports, virtual functions, cores, routes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdx.config.providers import Provider
from pdx.host.topology import Machine, Topology, read_topology
from pdx.host.topology.read import read_machine
from pdx.host.topology.sysfs import parse_list
from pdx.host.topology.tree import format_list
from tests.host.topology.machines import expand_text

_HOST = "node 0 socket=0 cpus=0-15 distances=10\nsmt 8\npci0000:10 numa=0\n"
_GPU = "  0000:11:00.0 gpu model=H100\n"


def machine(text: str, folder: Path) -> Machine:
    return read_machine(expand_text(text, folder))


def topology(text: str, folder: Path) -> Topology:
    return read_topology(expand_text(text, folder))


def nic(name: str, facts: str) -> str:
    return f"  0000:{name}.0 nic id=15b3:1021 rdma=mlx5_{name[:2]} rate=400 {facts}\n"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0-2,8", (0, 1, 2, 8)),
        ("3", (3,)),
        ("", ()),
        (None, ()),
        ("\n", ()),
        ("a-b", ()),
        ("5-", (5,)),
        ("4,1-2", (1, 2, 4)),
        ("0-99999999999", ()),
    ],
)
def test_lists_of_the_kernel(text: str | None, numbers: tuple[int, ...]) -> None:
    assert parse_list(text) == numbers


def test_lists_are_written_as_the_kernel_does() -> None:
    assert format_list([8, 0, 1, 2]) == "0-2,8"
    assert format_list([]) == ""


def test_port_that_is_down_is_not_used(tmp_path: Path) -> None:
    text = _HOST + _GPU + nic("12:00", "state=DOWN") + nic("13:00", "")
    found = topology(text, tmp_path)
    assert [choice.nic.name for choice in found.groups[0].nics] == ["mlx5_13"]
    assert {n.name: why for n, why in found.left_out}["mlx5_12"] == "its port is DOWN"


def test_virtual_function_gives_way_to_its_physical_one(tmp_path: Path) -> None:
    text = _HOST + nic("12:00", "") + nic("13:00", "physfn=0000:12:00.0")
    problems = {n.name: n.problem for n in machine(text, tmp_path).nics}
    assert problems == {"mlx5_12": None, "mlx5_13": "a virtual function of 0000:12:00.0"}


def test_virtual_function_is_used_where_the_physical_one_is_withheld(tmp_path: Path) -> None:
    text = _HOST + nic("12:00", "withheld") + nic("13:00", "physfn=0000:12:00.0")
    problems = {n.name: n.problem for n in machine(text, tmp_path).nics}
    assert problems["mlx5_13"] is None


def test_ena_is_no_efa(tmp_path: Path) -> None:
    text = (
        _HOST
        + "  0000:12:00.0 nic id=1d0f:ec20 net=ens1 mbps=100000\n"
        + "  0000:13:00.0 nic id=1d0f:efa2 class=0x028000 rdma=rdmap19s0 rate=100\n"
    )
    assert [(n.name, n.kind) for n in machine(text, tmp_path).nics] == [
        ("rdmap19s0", Provider.EFA),
        ("ens1", Provider.TCP),
    ]


def test_nic_without_any_device_here_is_still_shown(tmp_path: Path) -> None:
    (found,) = machine(_HOST + "  0000:12:00.0 nic id=15b3:1021\n", tmp_path).nics
    assert (found.name, found.kind) == ("0000:12:00.0", Provider.VERBS)
    assert found.problem is not None


def test_narrow_pcie_link_is_noted(tmp_path: Path) -> None:
    found = machine(_HOST + nic("12:00", "width=8"), tmp_path)
    assert found.notes == ("0000:12:00.0 runs with 8 of its 16 PCIe lanes",)


def test_gpus_are_found_in_proc_where_the_bus_is_hidden(tmp_path: Path) -> None:
    root = expand_text(_HOST + _GPU, tmp_path / "root")
    (root / "sys/bus").rename(tmp_path / "bus")
    (gpu,) = read_machine(root).gpus
    assert (gpu.place.address, gpu.model, gpu.problem) == ("0000:11:00.0", "H100", None)
    assert gpu.place.bridges == ()


def test_gpu_without_its_device_file_is_not_ours(tmp_path: Path) -> None:
    root = expand_text(_HOST + _GPU, tmp_path)
    (root / "dev/nvidia0").unlink()
    assert read_machine(root).gpus[0].problem == "/dev/nvidia0 is missing"


def test_default_route_with_the_least_metric_wins(tmp_path: Path) -> None:
    root = expand_text("virtual eth0\nvirtual eth1\n", tmp_path)
    (root / "proc/net").mkdir(parents=True)
    (root / "proc/net/route").write_text(
        "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
        "eth0 00000000 010200C0 0003 0 0 200 00000000 0 0 0\n"
        "eth1 00000000 010200C0 0003 0 0 100 00000000 0 0 0\n"
    )
    found = read_topology(root)
    assert found.machine.default_interface == "eth1"
    assert found.groups[0].nics[0].nic.name == "eth1"


def test_ipv6_default_route_serves_where_there_is_no_other(tmp_path: Path) -> None:
    root = expand_text("virtual eth0\nvirtual lo type=772\n", tmp_path)
    (root / "proc/net").mkdir(parents=True)
    zero = "0" * 32
    (root / "proc/net/ipv6_route").write_text(
        f"{zero} 00 {zero} 00 fe80{'0' * 28} 00000400 00000001 00000000 00000003 eth0\n"
        f"{zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200 lo\n"
    )
    assert read_machine(root).default_interface == "eth0"


def test_loopback_serves_where_there_is_no_network(tmp_path: Path) -> None:
    found = topology("virtual lo type=772\nvirtual docker0 operstate=down\n", tmp_path)
    assert [choice.nic.name for choice in found.groups[0].nics] == ["lo"]


def test_worker_is_not_pinned_where_no_core_is_to_spare(tmp_path: Path) -> None:
    text = _HOST + _GPU + nic("12:00", "")
    (worker,) = topology(f"{text}allowed 0-1,8-9\n", tmp_path / "two").workers
    assert worker.cpu is None
    assert "need 3 cores, 2 are there" in worker.why
    (worker,) = topology(f"{text}allowed 0-2,8-10\n", tmp_path / "three").workers
    assert worker.cpu == 2


def test_quota_of_the_cgroup_counts_as_cores(tmp_path: Path) -> None:
    text = _HOST + _GPU + nic("12:00", "") + "quota 2\n"
    (worker,) = topology(text, tmp_path).workers
    assert worker.cpu is None
    assert "the cgroup grants 2 CPUs" in worker.why


def test_one_hardware_thread_of_a_core_is_enough(tmp_path: Path) -> None:
    text = _HOST + _GPU + nic("12:00", "") + "allowed 8-11\n"
    assert topology(text, tmp_path).workers[0].cpu == 11


def test_worker_goes_to_the_next_node_where_its_own_has_no_core(tmp_path: Path) -> None:
    text = (
        "node 0 socket=0 cpus=0-3 distances=10,21,12\n"
        "node 1 socket=1 cpus=4-7 distances=21,10,21\n"
        "node 2 socket=0 cpus=8-11 distances=12,21,10\n"
        "allowed 4-11\npci0000:10 numa=0\n" + _GPU + nic("12:00", "")
    )
    (worker,) = topology(text, tmp_path).workers
    assert worker.cpu == 11
    assert "no core is left on the NIC's NUMA node (0)" in worker.why


def test_the_nearest_node_by_the_firmwares_distance_is_preferred(tmp_path: Path) -> None:
    text = (
        "node 0 socket=0 cpus=0-3 distances=10,12,32\n"
        "node 1 socket=0 cpus=4-7 distances=12,10,32\n"
        "node 2 socket=1 cpus=8-11 distances=32,32,10\n"
        "pci0000:10 numa=0\n" + _GPU + "pci0000:20 numa=2\n"
        "  0000:21:00.0 nic id=15b3:1021 rdma=mlx5_0 rate=400\n"
        "pci0000:30 numa=1\n"
        "  0000:31:00.0 nic id=15b3:1021 rdma=mlx5_1 rate=400\n"
    )
    found = topology(text, tmp_path)
    # Both are on another node, so the GPU takes both.
    assert [c.nic.name for c in found.groups[0].nics] == ["mlx5_0", "mlx5_1"]
    two = text.replace("0000:11:00.0 gpu", "0000:12:00.0 gpu") + "pci0000:40 numa=2\n"
    two += "  0000:41:00.0 gpu model=H100\n"
    found = topology(two, tmp_path / "two")
    assert [[c.nic.name for c in g.nics] for g in found.groups] == [["mlx5_1"], ["mlx5_0"]]


def test_nic_behind_a_nearer_switch_is_preferred_in_a_cascade(tmp_path: Path) -> None:
    text = (
        "node 0 socket=0 cpus=0-15 distances=10\npci0000:10 numa=0\n"
        "  0000:10:01.0 bridge\n"
        "    0000:11:00.0 bridge\n"
        "      0000:12:00.0 bridge\n"
        "        0000:13:00.0 nic id=15b3:1021 rdma=mlx5_0 rate=400\n"
        "      0000:12:01.0 bridge\n"
        "        0000:14:00.0 bridge\n"
        "          0000:15:00.0 bridge\n"
        "            0000:16:00.0 gpu model=B\n"
        "          0000:15:01.0 bridge\n"
        "            0000:17:00.0 nic id=15b3:1021 rdma=mlx5_1 rate=400\n"
        "      0000:12:02.0 bridge\n"
        "        0000:18:00.0 gpu model=A\n"
    )
    found = topology(text, tmp_path)
    assert [[c.nic.name for c in g.nics] for g in found.groups] == [["mlx5_1"], ["mlx5_0"]]
