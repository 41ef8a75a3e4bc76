"""read_weight_headers: names, shapes, types and sizes of all files, without a framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pdx.checkpoint.weight_headers import read_weight_headers
from pdx.errors import CheckpointError


def test_tensors_of_all_files(tmp_path: Path) -> None:
    save_file(
        {"a": np.zeros((2, 3), np.float32), "scalar": np.zeros((), np.float16)},
        tmp_path / "model-00001-of-00002.safetensors",
    )
    save_file({"b": np.zeros(5, np.int8)}, tmp_path / "model-00002-of-00002.safetensors")
    headers = read_weight_headers(tmp_path)
    assert {
        name: (tensor.path.name[:11], tensor.shape, tensor.dtype, tensor.num_bytes)
        for name, tensor in headers.items()
    } == {
        "a": ("model-00001", (2, 3), "F32", 24),
        "scalar": ("model-00001", (), "F16", 2),
        "b": ("model-00002", (5,), "I8", 5),
    }


def test_bytes_are_those_of_the_files(tiny_qwen3: Path) -> None:
    headers = read_weight_headers(tiny_qwen3)
    data = (tiny_qwen3 / "model.safetensors").stat().st_size
    header = sum(tensor.num_bytes for tensor in headers.values())
    assert 0 < data - header < 8192
    assert all(tensor.dtype == "BF16" for tensor in headers.values())


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("model-a.safetensors", "model-b.safetensors"):
        save_file({"head": np.zeros(1)}, tmp_path / name)
    with pytest.raises(CheckpointError, match="head is in model-a"):
        read_weight_headers(tmp_path)


def test_file_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(1000)}, path)
    with path.open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no safetensors file") as told:
        read_weight_headers(tmp_path)
    assert "download it again" in (told.value.hint or "")


def test_no_torch_is_imported(tiny_qwen3: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pdx.checkpoint.weight_headers import *;"
        "read_weight_headers(Path(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, tiny_qwen3], check=True)
