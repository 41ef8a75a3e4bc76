"""Registered memory: parts anywhere, one row of offsets through all of them. Pure."""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from pdx.errors import FabricError
from pdx.fabric.interface import MemoryPart, PageBatch

__all__ = ["Region", "check_place"]


@dataclass(slots=True, eq=False)
class Region:
    """See the module."""

    id: int
    parts: tuple[MemoryPart, ...]
    num_links: int = 0
    #: How long each part is.
    part_bytes: tuple[int, ...] = field(init=False)
    #: The offset at which each part begins, and that behind the last.
    _starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.part_bytes = tuple(part.num_bytes for part in self.parts)
        self._starts = [0, *accumulate(self.part_bytes)]

    def address(self, offset: int, num_bytes: int) -> int:
        """Where bytes that lie in one part are mapped."""
        index = bisect_right(self._starts, offset) - 1 if len(self.parts) > 1 else 0
        assert offset + num_bytes <= self._starts[index + 1]
        return self.parts[index].address + offset - self._starts[index]


def check_place(
    batch: PageBatch, our_part_bytes: Sequence[int], peer_part_bytes: Sequence[int]
) -> None:
    """Refuse a batch that does not lie in one part on each side.

    Raises:
        FabricError: with where it lies.
    """
    src_stride, dst_stride = batch.page_strides
    layers = batch.num_layers - 1
    src_pages, dst_pages = batch.src_pages.tolist(), batch.dst_pages.tolist()
    first = batch.src_offset + src_stride * min(src_pages)
    last = batch.src_offset + src_stride * max(src_pages)
    end = last + batch.src_layer_stride * layers + batch.page_bytes
    _check_range(first, end, our_part_bytes, "our")
    first = batch.dst_offset + dst_stride * min(dst_pages)
    last = batch.dst_offset + dst_stride * max(dst_pages)
    end = last + batch.dst_layer_stride * layers + batch.page_bytes
    _check_range(first, end, peer_part_bytes, "the peer's")


def _check_range(first: int, end: int, lengths: Sequence[int], whose: str) -> None:
    if len(lengths) == 1 and end <= lengths[0]:
        return
    ends = list(accumulate(lengths))
    if any(first >= stop - n and end <= stop for n, stop in zip(lengths, ends, strict=True)):
        return
    where = f"the batch reaches byte {end} of {whose} region of {ends[-1]} bytes"
    if len(ends) > 1:
        where = (
            f"the batch, from byte {first} to byte {end} of {whose} region, does not lie in one of "
            f"its parts, which end at bytes {' '.join(map(str, ends))}"
        )
    raise FabricError(where, code=errno.ERANGE)
