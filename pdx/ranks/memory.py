"""A rank's shared memory as the primary sees it: mapped from the descriptors that the rank passed.

The mapping outlives the fabric that registered it: close it last.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from pdx.kv.progress import PROGRESS_BYTES

__all__ = ["RankMemory"]


class RankMemory:
    """KV pages and progress word of one rank; owns the three descriptors and both mappings."""

    def __init__(self, *, kv_fd: int, progress_fd: int, eventfd: int, kv_bytes: int) -> None:
        self._fds = (kv_fd, progress_fd)
        self.progress_eventfd = eventfd
        self.kv_bytes = kv_bytes
        self._kv = mmap.mmap(kv_fd, kv_bytes)
        self._progress = mmap.mmap(progress_fd, PROGRESS_BYTES)
        self.kv_address = _address(self._kv)
        self.progress_address = _address(self._progress)

    def close(self) -> None:
        """Unmap. Nobody may use the addresses afterwards."""
        self._kv.close()
        self._progress.close()
        for fd in (*self._fds, self.progress_eventfd):
            os.close(fd)


def _address(mapping: mmap.mmap) -> int:
    view = ctypes.c_char.from_buffer(mapping)
    address = ctypes.addressof(view)
    del view  # an exported buffer would keep the mapping from closing
    return address
