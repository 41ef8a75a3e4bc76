"""The core's rules for providers, in C++: providers_test.cpp says what is checked."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pdx.errors import FabricError
from pdx.fabric import DeviceMemory, FabricOptions, MemoryPart, Provider, library_info, open_fabric
from tests.fabric.sides import Side

_CORE = Path(__file__).resolve().parents[3] / "pdx" / "fabric" / "native"


def test_rules_of_providers_whose_devices_are_not_here(tmp_path: Path) -> None:
    program = tmp_path / "providers_test"
    sources = [
        Path(__file__).with_name("providers_test.cpp"),
        _CORE / "libfabric.cpp",
        *sorted((_CORE / "providers").glob("*.cpp")),
    ]
    command = ["g++", "-std=c++20", "-O0", "-o", str(program), *map(str, sources), "-ldl"]
    subprocess.run(command, check=True)
    run = [program, library_info().path]
    done = subprocess.run(run, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_device_memory_is_refused_where_only_host_memory_moves(provider: Provider) -> None:
    with pytest.raises(FabricError, match=f"{provider} moves host memory only"):
        open_fabric(provider=provider, options=FabricOptions(device_memory=True))


def test_a_dmabuf_is_refused_by_a_fabric_for_host_memory(provider: Provider) -> None:
    side = Side(provider, 4096)
    try:
        half, memory = 2048, side.memory.ctypes.data
        device = DeviceMemory(dmabuf_fd=0, cuda_device=0)
        parts = [
            MemoryPart(address=memory, num_bytes=half),
            MemoryPart(address=memory + half, num_bytes=half, device=device),
        ]
        with pytest.raises(FabricError, match="device_memory"):
            side.fabric.register_parts(parts)
    finally:
        side.close()


@pytest.mark.parametrize("provider", ["verbs", "efa"])
def test_a_provider_without_a_device_is_refused(provider: Provider) -> None:
    with pytest.raises(FabricError, match=f"no usable {provider} provider"):
        open_fabric(provider=provider)
