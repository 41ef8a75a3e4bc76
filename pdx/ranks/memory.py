"""The ranks' shared memory as the primary sees it: mapped from the descriptors that they passed.

All ranks' KV lies in one range of addresses, so that a fabric registers it once and a plan names a
place in it by one offset. The mapping outlives the fabric that registered it: close it last.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from pdx.errors import WorkerError
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

    def close(self) -> None:
        """Close all three."""
        for fd in (self.kv_fd, self.progress_fd, self.progress_eventfd):
            os.close(fd)


class NodeMemory:
    """KV pages and progress words of all ranks; owns the descriptors and the mappings."""

    def __init__(self, ranks: Sequence[RankDescriptors], layout: NodeLayout) -> None:
        assert len(ranks) == layout.tp_size
        self._ranks = list(ranks)
        self.kv_bytes = layout.total_bytes
        # Reserves the addresses; closing it unmaps whatever was mapped over it.
        self._kv = mmap.mmap(-1, layout.total_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.kv_address = _address(self._kv)
        for rank_idx, rank in enumerate(ranks):
            address = self.kv_address + rank_idx * layout.rank_stride_bytes
            _map_over(address, rank.kv_fd, layout.rank.total_bytes)
        self._progress = [mmap.mmap(rank.progress_fd, PROGRESS_BYTES) for rank in ranks]
        self.progress_addresses = tuple(_address(mapping) for mapping in self._progress)
        self.progress_eventfds = tuple(rank.progress_eventfd for rank in ranks)

    def close(self) -> None:
        """Unmap. Nobody may use the addresses afterwards."""
        self._kv.close()
        for mapping in self._progress:
            mapping.close()
        for rank in self._ranks:
            rank.close()


def _map_over(address: int, fd: int, num_bytes: int) -> None:
    """Map a file at a place that is ours, in the stead of what is mapped there."""
    flags = mmap.MAP_SHARED | _MAP_FIXED
    mapped = _libc.mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if mapped != address:
        raise WorkerError(
            f"a rank's KV memory of {num_bytes} bytes cannot be mapped: "
            f"{os.strerror(ctypes.get_errno())}"
        )
    # As the rank does: whoever touches a page first decides its size. Refused by kernels without.
    _libc.madvise(address, num_bytes, mmap.MADV_HUGEPAGE)


def _address(mapping: mmap.mmap) -> int:
    view = ctypes.c_char.from_buffer(mapping)
    address = ctypes.addressof(view)
    del view  # an exported buffer would keep the mapping from closing
    return address
