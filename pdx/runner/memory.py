"""Memory that the rank writes and its primary maps: KV pages and the progress word. Made once, by
the rank's main thread; all of it lives as long as the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from pdx.kv import cumem
from pdx.kv.layout import KvLayout
from pdx.kv.progress import PROGRESS_BYTES

__all__ = ["ExportedKv", "SharedMemory", "export_kv", "export_progress", "kv_tensor"]

#: The size of a huge page on x86-64, and on aarch64 with its usual pages. Memory must begin at a
#: multiple of it to lie in huge pages.
_HUGE_PAGE_BYTES = 2 << 20


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedKv:
    """What the primary needs to map the KV memory."""

    fd: int
    #: The GPU whose memory it is; None: the host's.
    cuda_device: int | None = None
    #: What the primary should let each rank's memory begin at a multiple of.
    alignment: int


def kv_tensor(buffer: mmap.mmap | bytearray, layout: KvLayout, dtype: torch.dtype) -> Tensor:
    """The layout's view of a buffer, [L, P, Hkv, parts, S, D]; the tensor keeps it alive."""
    return _view(torch.frombuffer(buffer, dtype=torch.uint8), layout, dtype)


def _view(memory: Tensor, layout: KvLayout, dtype: torch.dtype) -> Tensor:
    shape = (
        layout.num_layers,
        layout.num_pages,
        layout.num_kv_heads,
        layout.num_parts,
        layout.page_size,
        layout.head_dim,
    )
    return memory.view(dtype).view(shape)


def export_kv(
    layout: KvLayout, dtype: torch.dtype, device: torch.device, *, poison: bool
) -> tuple[ExportedKv, Tensor]:
    """KV memory for all pages, NaN in it where ``poison``: a read of what nobody wrote shows.

    In huge pages where the host allows them for shared memory. The tensor keeps it mapped.

    Raises:
        PdxError: the GPU does not give it.
    """
    if device.type == "cuda":
        exported, kv = _export_on_gpu(layout, dtype, device.index)
    else:
        memory = SharedMemory.create("pdx-kv", layout.total_bytes)
        with contextlib.suppress(OSError):  # a kernel without them
            memory.mapping.madvise(mmap.MADV_HUGEPAGE)
        exported = ExportedKv(fd=memory.fd, alignment=_HUGE_PAGE_BYTES)
        kv = kv_tensor(memory.mapping, layout, dtype)
    if poison:
        kv.view(torch.uint8).fill_(0xFF)  # NaN in every type that KV memory has
    return exported, kv


def _export_on_gpu(layout: KvLayout, dtype: torch.dtype, device: int) -> tuple[ExportedKv, Tensor]:
    alignment = cumem.granularity_bytes(device)
    num_bytes = -(-layout.total_bytes // alignment) * alignment
    fd, mapped = cumem.create_shared(num_bytes, device=device)
    kv = _view(_tensor_at(mapped, layout.total_bytes, device), layout, dtype)
    return ExportedKv(fd=fd, cuda_device=device, alignment=alignment), kv


def _tensor_at(mapped: cumem.GpuRange, num_bytes: int, device: int) -> Tensor:
    """Mapped GPU memory as uint8 [num_bytes]; the tensor keeps it mapped."""
    array = _CudaArray(mapped, num_bytes)
    return torch.as_tensor(array, device=torch.device("cuda", device))


class _CudaArray:
    """Mapped GPU memory in the form that torch takes without a copy, and keeps alive."""

    def __init__(self, mapped: cumem.GpuRange, num_bytes: int) -> None:
        self._mapped = mapped
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (num_bytes,),
            "data": (mapped.address, False),
        }


def export_progress() -> tuple[SharedMemory, int]:
    """The progress memory, and the eventfd that wakes its readers."""
    memory = SharedMemory.create("pdx-progress", PROGRESS_BYTES)
    # Non-blocking: a counter that nobody reads must never stop the rank.
    return memory, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
