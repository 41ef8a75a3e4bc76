"""ParameterMemory: room for each parameter, apart, aligned, and in huge pages where there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdx.weights.memory import ParameterMemory

CPU = torch.device("cpu")
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_parameters_lie_apart_on_cache_lines() -> None:
    shapes = [torch.Size((3, 5)), torch.Size((7,)), torch.Size((0,)), torch.Size((1000, 3))]
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float8_e4m3fn]
    both = list(zip(shapes, dtypes, strict=True))
    memory = ParameterMemory([shape.numel() * dtype.itemsize for shape, dtype in both], CPU)
    made = [memory.empty(shape, dtype) for shape, dtype in both]
    for idx, tensor in enumerate(made):
        tensor.view(torch.uint8).fill_(idx)
    for idx, (tensor, (shape, dtype)) in enumerate(zip(made, both, strict=True)):
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.data_ptr() % 64 == 0
        assert (tensor.view(torch.uint8) == idx).all()


@pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text(), reason="this system gives no huge pages"
)
def test_parameters_lie_in_huge_pages() -> None:
    memory = ParameterMemory([1000, 16 << 20], CPU)
    before = _huge_bytes()
    memory.empty(torch.Size((1000,)), torch.uint8).fill_(1)
    memory.empty(torch.Size((16 << 20,)), torch.uint8).fill_(1)
    assert _huge_bytes() - before >= 16 << 20


def _huge_bytes() -> int:
    """Of this process, in anonymous huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages:"))
