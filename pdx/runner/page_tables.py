"""The page tables of a rank's requests, which live across passes. The rank's main thread.

All of them lie in one array, which ops of the host read as it is. A request owns a region of it, a
power of two long, so that a new page is one store and shifts nothing. A table that outgrows its
region moves to one of twice the size; the region that it leaves serves the next table of that size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PageTable", "PageTableArray"]

#: Pages that the smallest region holds.
_SMALLEST = 16


@dataclass(slots=True)
class PageTable:
    """One request's pages: ``num_pages`` of the array from ``start`` on."""

    start: int = 0
    num_pages: int = 0
    #: How many pages its region of the table can hold; 0: it has none yet.
    capacity: int = 0


class PageTableArray:
    """Owns the array; mutable. A pass reads it until its end, and changes come between passes."""

    def __init__(self) -> None:
        #: Pages of all tables. A larger one takes its place when it is full.
        self.pages: NDArray[np.int32] = np.zeros(1024, np.int32)
        self._end = 0
        #: Starts of regions that nobody has, by their size.
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def append(self, table: PageTable, page_indices: Sequence[int]) -> None:
        """Add pages to the end of a table."""
        num_pages = table.num_pages + len(page_indices)
        if num_pages > table.capacity:
            self._move(table, max(_SMALLEST, 1 << (num_pages - 1).bit_length()))
        self.pages[table.start + table.num_pages : table.start + num_pages] = page_indices
        table.num_pages = num_pages

    def free(self, table: PageTable) -> None:
        """Give a table's region back; the table is not used again."""
        if table.capacity:
            self._free[table.capacity].append(table.start)

    def _move(self, table: PageTable, capacity: int) -> None:
        if self._free[capacity]:
            start = self._free[capacity].pop()
        else:
            start, self._end = self._end, self._end + capacity
            if self._end > len(self.pages):
                larger = np.zeros(1 << (self._end - 1).bit_length(), np.int32)
                larger[: len(self.pages)] = self.pages
                self.pages = larger
        old = slice(table.start, table.start + table.num_pages)
        self.pages[start : start + table.num_pages] = self.pages[old]
        self.free(table)
        table.start, table.capacity = start, capacity
