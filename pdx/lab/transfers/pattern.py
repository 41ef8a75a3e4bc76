"""What every system of `pdx bench transfer` moves: which pages, in which order, with which bytes.

Pure, NumPy only: the peers' processes import it as a file, without pdx.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Cell",
    "Memory",
    "available_bytes",
    "count_wrong",
    "fill",
    "map_pool",
    "new_file",
    "order_of",
    "shared_memory",
    "slices_of",
]

#: Bytes that are filled or compared at a time.
_CHUNK_BYTES = 8 << 20
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement: batches of pages of one size, for some time."""

    pool_bytes: int
    page_bytes: int
    #: Pages of a batch; each has an atom in every layer.
    batch_pages: int
    layers: int
    #: Pages that are neighbours on both sides, so that writes can be merged; 1: none.
    neighbours: int
    seconds: float
    #: Goes into the bytes, so that a page left by another cell is noticed.
    number: int

    @property
    def layer_pages(self) -> int:
        """Pages of a layer's part of the pool."""
        return self.pool_bytes // (self.page_bytes * self.layers)

    @property
    def layer_bytes(self) -> int:
        """From a page's atom in one layer to its atom in the next."""
        return self.layer_pages * self.page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Descriptors of two anonymous files: what is written from, and what is written to.

    All systems of a run take turns with the same two. Pages of files that were made one after
    another lie differently in physical memory, and over shm that alone made the same program 0.5 to
    1.0 times as fast.
    """

    source_fd: int
    target_fd: int


@contextlib.contextmanager
def shared_memory(num_bytes: int) -> Iterator[Memory]:
    """Both files of a run; each system maps them for itself."""
    memory = Memory(source_fd=new_file(num_bytes), target_fd=new_file(num_bytes))
    try:
        yield memory
    finally:
        os.close(memory.source_fd)
        os.close(memory.target_fd)


def available_bytes() -> int | None:
    """Memory of this host that nobody needs, as Linux estimates it; None: not told."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return next((int(number) << 10 for _, number, _ in found), None)


def new_file(num_bytes: int) -> int:
    """The descriptor of an anonymous file, as a node's KV memory is one, with all its memory. The
    caller closes it.
    """
    fd = os.memfd_create("pdx-bench", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, num_bytes)
    return fd


def map_pool(fd: int, num_bytes: int) -> tuple[mmap.mmap, NDArray[np.uint8]]:
    """The file's memory, mapped. Its bytes stay: another system may be at work on them."""
    memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return memory, np.frombuffer(memory, np.uint8)


def order_of(cell: Cell) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Source and target pages in the order in which they are written: fixed, and random by runs of
    ``neighbours``.
    """
    runs = cell.layer_pages // cell.neighbours
    random = np.random.default_rng(7)

    def side() -> NDArray[np.uint32]:
        starts = random.permutation(runs).astype(np.uint32) * np.uint32(cell.neighbours)
        return (starts[:, None] + np.arange(cell.neighbours, dtype=np.uint32)).reshape(-1)

    return side(), side()


def slices_of(cell: Cell) -> Iterator[slice]:
    """Batches without end, as slices of the order."""
    written = (cell.layer_pages // cell.neighbours) * cell.neighbours
    while True:
        for start in range(0, written, cell.batch_pages):
            yield slice(start, min(start + cell.batch_pages, written))


def fill(pool: NDArray[np.uint8], cell: Cell) -> None:
    """Give every atom's every word a value of its own."""
    words = _words(pool, cell.page_bytes)
    for rows in _rows(len(words), cell.page_bytes):
        words[rows] = _values(np.arange(rows.start, rows.stop, dtype=np.uint64), cell)


def count_wrong(pool: NDArray[np.uint8], cell: Cell, num_pages: int) -> int:
    """How many atoms of the first ``num_pages`` of the order do not hold their source's bytes."""
    src, dst = order_of(cell)
    words = _words(pool, cell.page_bytes)
    wrong = 0
    for layer in range(cell.layers):
        first = layer * cell.layer_pages
        for rows in _rows(min(num_pages, len(src)), cell.page_bytes):
            want = _values(first + src[rows].astype(np.uint64), cell)
            wrong += int((words[first + dst[rows]] != want).any(axis=1).sum())
    return wrong


def _words(pool: NDArray[np.uint8], page_bytes: int) -> NDArray[np.uint64]:
    whole = len(pool) // page_bytes * page_bytes
    return pool[:whole].view(np.uint64).reshape(-1, page_bytes // 8)


def _rows(count: int, page_bytes: int) -> Iterator[slice]:
    step = max(1, _CHUNK_BYTES // page_bytes)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _values(atoms: NDArray[np.uint64], cell: Cell) -> NDArray[np.uint64]:
    first = (atoms + np.uint64(cell.number << 32)) * _MIX
    return first[:, None] + np.arange(cell.page_bytes // 8, dtype=np.uint64)
