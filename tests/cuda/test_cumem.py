"""KV memory on a GPU, shared between a node's processes. On a double of the driver, or on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Environment = dict[str, str]
_DRIVER = Path("/proc/driver/nvidia/version")
NOTHING = [0, 0, 0, 0]
#: What stays taken when the driver refuses to take it back: allocations, handles, mappings,
#: reservations.
STAYS = {
    "cuMemRelease": [1, 1, 0, 0],
    "cuMemUnmap": [1, 0, 1, 1],
    "cuMemAddressFree": [0, 0, 0, 1],
}


def run(program: str, environment: Environment) -> Any:
    command = [sys.executable, "-m", *f"tests.cuda.{program}".split()]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_a_primary_and_its_ranks_share_memory_until_the_last_lets_go(cuda: Environment) -> None:
    found = run("processes life", cuda)
    assert found["signed"] == ["first", "other"], "rank after rank"
    written, live_in_rank = found["rank"]
    assert written == "hello"
    assert found["after_ranks"] == found["signed"], "the mapping outlives the ranks, also a killed"
    assert found["mapped"] in (None, [2, 0, 2, 1]), "mapped memory needs no handle"
    assert live_in_rank in (None, NOTHING)
    assert found["live"] in (None, NOTHING)
    assert found["fds"] == 0


def test_memory_of_another_granularity_is_refused_and_let_go(cuda: Environment) -> None:
    found = run("processes granularity", cuda)
    assert "cuMem" in found["error"]
    assert found["unchanged"]
    assert found["live"] in (None, NOTHING)


def test_every_call_that_fails_is_named_and_leaks_nothing(double: Environment) -> None:
    init, *faults = run("processes faults", double)
    assert init["error"] == [
        "WorkerError",
        "cuInit failed: CUDA_ERROR_NO_DEVICE",
        "check nvidia-smi and CUDA_VISIBLE_DEVICES",
    ]
    for fault in faults:
        call = fault["call"]
        stays = STAYS.get(call, NOTHING)
        assert fault["leaked"] == stays, fault
        assert fault["fds"] == stays[0], "the double has one for each allocation"
        if call in STAYS:
            assert fault["error"] is None, "the life goes on"
            assert fault["logged"][0].startswith(call), fault
        else:
            kind, message, hint = fault["error"]
            where = "" if call == "cuMemAddressReserve" else " on CUDA device 0"
            assert (kind, message) == (
                "WorkerError",
                f"{call}{where} failed: CUDA_ERROR_OUT_OF_MEMORY",
            )
            assert "--kv-memory" in hint
            assert fault["logged"] == []
    assert {fault["call"] for fault in faults} == {
        "cuDeviceGet",
        "cuDeviceGetAttribute",
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemGetHandleForAddressRange",
        *STAYS,
    }


def test_a_device_that_cannot_share_is_refused(double: Environment) -> None:
    found = run("processes devices", double)
    kind, message, hint = found["absent"]
    assert kind == "WorkerError" and "device 7" in message and "CUDA_VISIBLE_DEVICES" in hint
    for case in ("no virtual memory", "no descriptors"):
        kind, message, hint = found[case]
        assert kind == "ConfigError" and "device 1 cannot share memory" in message and hint
    assert found["no GPUDirect"] == [], "nothing but network cards misses it"
    kind, message, hint = found["no DMA-BUF"]
    assert kind == "ConfigError" and "gives network cards no memory" in message and hint


def test_a_nodes_gpus_are_parts_of_one_region_and_written_over_a_fabric(
    double: Environment,
) -> None:
    """As far as a host without network cards for GPUs goes: the core refuses to open one."""
    one, two = run("over_fabric", double)
    # Whole granules, also of the last rank: that much the DMA-BUF has.
    for found, gpus in ((one, [1]), (two, [0, 1])):
        assert found["registered"] == 2 * [[[gpu, 8 << 20, True] for gpu in gpus]]
        assert found["atoms"] == 3 * len(gpus) and found["arrived"]
        assert found["unchanged"] and found["fds"] == 0


@pytest.mark.skipif(_DRIVER.exists(), reason="there is a driver")
def test_a_host_without_a_driver_is_told_so() -> None:
    kind, message, hint = run("processes driverless", dict(os.environ))
    assert kind == "ConfigError"
    assert message.startswith("cuInit cannot be called")
    assert "NVIDIA driver" in hint


@pytest.mark.gpu
def test_the_ranks_tensor_is_the_memory_that_the_primary_maps() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    from pdx.runner.memory import export_kv
    from tests.cuda import processes

    exported, kv = export_kv(processes.RANK, torch.float32, torch.device("cuda", 0), poison=True)
    assert exported.cuda_device == 0
    memory = processes.node_memory([exported.fd], [0], exported.alignment)
    assert kv.isnan().all()
    kv[2, 95, 1, 1, 15, 60:] = torch.arange(4.0)
    torch.cuda.synchronize()
    last = processes.read(memory.kv_address + processes.RANK.total_bytes - 16, 16)
    memory.close()
    assert last == torch.arange(4.0).numpy().tobytes()


def test_a_pass_writes_what_the_primary_maps(double: Environment, tiny_llama: Path) -> None:
    """All of a GPU rank but the GPU: the driver's memory (the double's), interpreted kernels."""
    kernels = {"PDX_KERNELS": "interpret", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.cuda.rank_pass", str(tiny_llama)]
    ended = subprocess.run(
        command, env=double | kernels, capture_output=True, text=True, timeout=85, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["same"] and found["unwritten_is_nan"] and found["word"]
    assert found["written"] > 0
    assert found["wakeups"] == 0, "a kernel's store wakes nobody"
