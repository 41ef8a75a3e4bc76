"""The ranks' shared memory as the primary sees it: mapped from the descriptors that they passed.

All ranks' KV lies in one range of addresses, and a plan names a place in it by one offset. A fabric
registers the host's memory as one part, a GPU's as one part for each rank. The mapping outlives the
fabric that registered it: close it last.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pdx.errors import WorkerError
from pdx.fabric import DeviceMemory, MemoryPart
from pdx.kv.cumem import GpuRange, export_dmabuf
from pdx.kv.layout import NodeLayout
from pdx.kv.progress import PROGRESS_BYTES

__all__ = ["NodeMemory", "RankDescriptors"]

_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDescriptors:
    """What a rank has passed; the primary owns these copies."""

    kv_fd: int
    progress_fd: int
    progress_eventfd: int
    #: The GPU whose memory ``kv_fd`` is; None: it is a file in the host's memory.
    cuda_device: int | None = None

    def close(self) -> None:
        """Close all three."""
        for fd in (self.kv_fd, self.progress_fd, self.progress_eventfd):
            os.close(fd)


class NodeMemory:
    """KV pages and progress words of all ranks; owns the descriptors and the mappings."""

    def __init__(self, ranks: Sequence[RankDescriptors], layout: NodeLayout) -> None:
        """
        Raises:
            PdxError: something cannot be mapped. The descriptors are closed then, too.
        """
        assert len(ranks) == layout.tp_size
        self.kv_bytes = layout.total_bytes
        self._rank_stride_bytes = layout.rank_stride_bytes
        self._devices = tuple(r.cuda_device for r in ranks if r.cuda_device is not None)
        with ExitStack() as undo:
            for rank in ranks:
                undo.callback(rank.close)
            self.kv_address = _map_kv(ranks, layout, undo)
            progress = [mmap.mmap(rank.progress_fd, PROGRESS_BYTES) for rank in ranks]
            for mapping in progress:
                undo.callback(mapping.close)
            self.progress_addresses = tuple(_address(mapping) for mapping in progress)
            # A GPU's word is stored by a kernel, which wakes nobody: without a descriptor to wait
            # for, readers look at the word again and again while they expect something of it.
            self.progress_eventfds = tuple(
                rank.progress_eventfd for rank in ranks if rank.cuda_device is None
            )
            self._undo = undo.pop_all()

    def kv_parts(self) -> tuple[MemoryPart, ...]:
        """What network cards are given: the host's memory as a whole, a GPU's rank by rank.

        A GPU's descriptors stay open until :meth:`close`.

        Raises:
            PdxError: a GPU's driver gives none.
        """
        if not self._devices:
            return (MemoryPart(address=self.kv_address, num_bytes=self.kv_bytes),)
        return tuple(map(self._gpu_part, range(len(self._devices)), self._devices))

    def _gpu_part(self, rank_idx: int, device: int) -> MemoryPart:
        num_bytes = self._rank_stride_bytes
        address = self.kv_address + rank_idx * num_bytes
        fd = export_dmabuf(address, num_bytes, device=device)
        self._undo.callback(os.close, fd)
        memory = DeviceMemory(dmabuf_fd=fd, cuda_device=device)
        return MemoryPart(address=address, num_bytes=num_bytes, device=memory)

    def close(self) -> None:
        """Unmap. Nobody may use the addresses afterwards."""
        self._undo.close()


def _map_kv(ranks: Sequence[RankDescriptors], layout: NodeLayout, undo: ExitStack) -> int:
    """Map all ranks' KV side by side, until ``undo``; returns the address of the first."""
    stride = layout.rank_stride_bytes
    if ranks[0].cuda_device is None:
        host = _HostRange(layout.tp_size * stride, layout.alignment)
        undo.callback(host.close)
        for rank_idx, rank in enumerate(ranks):
            host.map_shared(rank_idx * stride, rank.kv_fd, layout.rank.total_bytes)
        return host.address
    gpus = GpuRange(layout.tp_size * stride)
    undo.callback(gpus.close)
    for rank_idx, rank in enumerate(ranks):
        assert rank.cuda_device is not None, "the ranks of a node are of one kind"
        gpus.map_shared(rank_idx * stride, rank.kv_fd, stride, device=rank.cuda_device)
    return gpus.address


class _HostRange:
    """A range of addresses of this process, with files of the host's memory mapped into it. What
    GpuRange is to GPUs.
    """

    def __init__(self, num_bytes: int, alignment: int) -> None:
        # Reserves the addresses; closing it unmaps whatever was mapped over it.
        length = num_bytes + alignment
        try:
            self._reserved = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise WorkerError(
                f"{length:,} bytes of addresses for the ranks' KV memory are refused: "
                f"{error.strerror}",
                hint="give the KV cache less (--kv-memory), or this process more (ulimit -v)",
            ) from error
        self.address = -(-_address(self._reserved) // alignment) * alignment

    def map_shared(self, offset: int, fd: int, num_bytes: int) -> None:
        """Map a file that a rank has made; the descriptor stays the caller's.

        Raises:
            WorkerError: the system refused.
        """
        address = self.address + offset
        flags = mmap.MAP_SHARED | _MAP_FIXED
        mapped = _libc.mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if mapped != address:
            raise WorkerError(
                f"a rank's KV memory of {num_bytes} bytes cannot be mapped: "
                f"{os.strerror(ctypes.get_errno())}"
            )
        # The rank does the same: whoever touches a page first decides its size. Kernels
        # without huge pages refuse it.
        _libc.madvise(address, num_bytes, mmap.MADV_HUGEPAGE)

    def close(self) -> None:
        """Unmap everything."""
        self._reserved.close()


def _address(mapping: mmap.mmap) -> int:
    view = ctypes.c_char.from_buffer(mapping)
    address = ctypes.addressof(view)
    del view  # an exported buffer would keep the mapping from closing
    return address
