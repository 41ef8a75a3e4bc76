"""Where a model's parameters lie: on a CPU in one range of huge pages."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable

import torch

__all__ = ["ParameterMemory"]

_HUGE_PAGE_BYTES = 2 << 20
#: A cache line, and a row of an AMX tile.
_ALIGNMENT = 64


class ParameterMemory:
    """Room for parameters that are made one after another.

    A decode step reads every weight once and little twice, so each small page of them costs a walk
    of the page table, which in a virtual machine is one of two tables: from huge pages a product of
    one row reads 256 MiB of weights 3 times as fast there (docs/kernels.md). malloc's memory is in
    small ones wherever the system gives huge pages only to those that ask. A kernel without huge
    pages gives small ones here too.

    Args:
        sizes: in bytes, of all parameters that are made.
        device: theirs.
    """

    def __init__(self, sizes: Iterable[int], device: torch.device) -> None:
        self._device = device
        self._room: torch.Tensor | None = None
        if device.type == "cpu":
            self._room = _huge_pages(sum(map(_aligned, sizes)))
        self._used_bytes = 0

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The next parameter, not filled. It keeps the whole room mapped."""
        if self._room is None:
            return torch.empty(shape, dtype=dtype, device=self._device)
        num_bytes = shape.numel() * dtype.itemsize
        made = self._room[self._used_bytes :][:num_bytes]
        self._used_bytes += _aligned(num_bytes)
        return made.view(dtype).view(shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _huge_pages(num_bytes: int) -> torch.Tensor:
    """Private memory from a huge page's beginning on, uint8 [num_bytes]."""
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    return memory[-memory.data_ptr() % _HUGE_PAGE_BYTES :][:num_bytes]
