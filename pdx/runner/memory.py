"""Memory that the rank writes and its primary maps: KV pages and the progress word. Made once."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from pdx.kernels.cpu.progress import ProgressWord
from pdx.kv.layout import KvLayout
from pdx.kv.progress import PROGRESS_BYTES

__all__ = ["SharedMemory", "export_kv", "export_progress", "kv_tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """An anonymous file and our mapping of it; both live as long as the process."""

    fd: int
    mapping: mmap.mmap

    @classmethod
    def create(cls, name: str, num_bytes: int) -> SharedMemory:
        """Zeroed memory of a size that nobody can change any more, so that no mapping can fault."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        return cls(fd=fd, mapping=mmap.mmap(fd, num_bytes))


def kv_tensor(buffer: mmap.mmap | bytearray, layout: KvLayout, dtype: torch.dtype) -> Tensor:
    """The layout's view of a buffer, [L, P, Hkv, 2, S, D]; the tensor keeps the buffer alive."""
    shape = (
        layout.num_layers,
        layout.num_pages,
        layout.num_kv_heads,
        2,
        layout.page_size,
        layout.head_dim,
    )
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def export_kv(layout: KvLayout, dtype: torch.dtype, *, poison: bool) -> tuple[SharedMemory, Tensor]:
    """KV memory for all pages, NaN in it where ``poison``: a read of what nobody wrote shows.

    In huge pages where the host allows them for shared memory.
    """
    memory = SharedMemory.create("pdx-kv", layout.total_bytes)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.mapping.madvise(mmap.MADV_HUGEPAGE)
    kv = kv_tensor(memory.mapping, layout, dtype)
    if poison:
        kv.fill_(float("nan"))
    return memory, kv


def export_progress() -> tuple[SharedMemory, int, ProgressWord]:
    """The progress memory, the eventfd that wakes its readers, and the word that writes both."""
    memory = SharedMemory.create("pdx-progress", PROGRESS_BYTES)
    # Non-blocking: a counter that nobody reads must never stop the rank.
    eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    return memory, eventfd, ProgressWord(memory.mapping, eventfd)
