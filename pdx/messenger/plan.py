"""The sharding plan: which bytes of a request go from which rank to which, as how many atoms. Pure.

Both sides compute it from the two nodes' layouts, so they agree on what is counted. A request's
token positions are cut into *runs* of tokens that lie in one page on both sides: whole pages where
the page sizes are equal, else their greatest common divisor. A decoder's rank gets the heads that
it holds, each from one prefiller's rank that holds them too (:class:`Share`). An *atom* is

- with equal page sizes: a share's heads of one page of one layer, contiguous on both sides;
- else: one run of one part (K or V) of one head of one layer.

Everything goes by position, so nothing is ever paired by its place in a list. Plans name pages and
layers' strides; the fabric's worker expands layers. docs/sharding.md draws each case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pdx.errors import InvalidRequest
from pdx.fabric import PageBatch
from pdx.kv.layout import KvLayout, NodeLayout

__all__ = [
    "RankBatch",
    "SendCursor",
    "Share",
    "TransferPlan",
    "atoms_by_rank",
    "shares",
    "transfer_bytes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Neighbouring heads that one source rank writes for one destination rank."""

    src_rank: int
    dst_rank: int
    #: Place of the first head in each rank's memory.
    src_head: int
    dst_head: int
    num_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """Pages that one source rank's progress sets off."""

    src_rank: int
    batch: PageBatch


def shares(src: NodeLayout, dst: NodeLayout, transfer_id: int) -> tuple[Share, ...]:
    """Who writes what for whom: every head of every destination rank once.

    Where several source ranks hold a head, each transfer and each destination replica takes the
    next one of them, so that all of them (and their network cards) work.
    """
    found = []
    for dst_rank in range(dst.tp_size):
        wanted = dst.heads(dst_rank)
        dst_replica = dst_rank % dst.num_replicas
        src_replica = (transfer_id + dst_replica) % src.num_replicas
        for src_rank in range(src_replica, src.tp_size, src.num_replicas):
            held = src.heads(src_rank)
            first, stop = max(wanted.start, held.start), min(wanted.stop, held.stop)
            if first < stop:
                share = Share(
                    src_rank=src_rank,
                    dst_rank=dst_rank,
                    src_head=first - held.start,
                    dst_head=first - wanted.start,
                    num_heads=stop - first,
                )
                found.append(share)
    return tuple(found)


def _run_len(src: NodeLayout, dst: NodeLayout) -> int:
    return math.gcd(src.rank.page_size, dst.rank.page_size)


def _atoms_per_run(src: NodeLayout, dst: NodeLayout, share: Share) -> int:
    """Over all layers."""
    equal = src.rank.page_size == dst.rank.page_size
    return src.rank.num_layers * (1 if equal else share.num_heads * src.rank.num_parts)


def atoms_by_rank(
    src: NodeLayout, dst: NodeLayout, transfer_id: int, first_position: int, num_tokens: int
) -> list[int]:
    """Atoms that each destination rank counts for positions ``first_position <= i < num_tokens``.

    Args:
        first_position: a multiple of the destination's page size.
    """
    run_len = _run_len(src, dst)
    num_runs = -(-num_tokens // run_len) - first_position // run_len
    atoms = [0] * dst.tp_size
    for share in shares(src, dst, transfer_id):
        atoms[share.dst_rank] += num_runs * _atoms_per_run(src, dst, share)
    return atoms


def transfer_bytes(src: NodeLayout, dst: NodeLayout, first_position: int, num_tokens: int) -> int:
    """What moves for these positions: whole runs, for each destination rank."""
    run_len = _run_len(src, dst)
    num_runs = -(-num_tokens // run_len) - first_position // run_len
    token_bytes = dst.tp_size * dst.rank.num_layers * dst.rank.page_bytes // dst.rank.page_size
    return num_runs * run_len * token_bytes


class TransferPlan:
    """One transfer as both sides agree on it.

    Args:
        dst_page_indices: the decoder's pages for positions ``first_position`` onwards, in order.
    """

    def __init__(
        self,
        src: NodeLayout,
        dst: NodeLayout,
        *,
        transfer_id: int,
        num_tokens: int,
        first_position: int,
        dst_page_indices: list[int],
    ) -> None:
        self._src, self._dst = src, dst
        self._transfer_id = transfer_id
        self.num_tokens = num_tokens
        self.first_position = first_position
        self._dst_page_indices = dst_page_indices
        self._shares = shares(src, dst, transfer_id)
        self.run_len = _run_len(src, dst)

    def check(self, atoms: list[int]) -> None:
        """Compare with what the decoder declared.

        Raises:
            InvalidRequest: naming what does not fit.
        """
        page_size, num_dst_pages = self._dst.rank.page_size, self._dst.rank.num_pages
        if self.num_tokens < 1:
            raise InvalidRequest("a transfer of no tokens", param="token_ids")
        if self.first_position % page_size or not 0 <= self.first_position < self.num_tokens:
            raise InvalidRequest(
                f"first position {self.first_position} is not a page's start within "
                f"{self.num_tokens} tokens (page size {page_size})",
                param="first_position",
            )
        planned = atoms_by_rank(
            self._src, self._dst, self._transfer_id, self.first_position, self.num_tokens
        )
        num_pages = -(-self.num_tokens // page_size) - self.first_position // page_size
        pages = self._dst_page_indices
        if planned != atoms or len(pages) != num_pages:
            raise InvalidRequest(
                f"the plan has {planned} atoms by rank in {num_pages} pages, the decoder expects "
                f"{atoms} in {len(pages)} pages",
                param="atoms_by_rank",
            )
        bad = [i for i in pages if not 0 <= i < num_dst_pages]
        if bad or len(set(pages)) != len(pages):
            raise InvalidRequest(
                f"destination pages must be distinct and below {num_dst_pages}; bad: {bad[:4]}",
                param="page_indices",
            )

    @cached_property
    def _dst_pages(self) -> NDArray[np.int64]:
        """Made once they are checked: what a peer sends may be any number."""
        return np.array(self._dst_page_indices, np.int64)

    def batches(
        self, src_page_indices: tuple[int, ...], first_run: int, stop_run: int
    ) -> tuple[RankBatch, ...]:
        """The writes of runs ``first_run <= i < stop_run``, all layers of them.

        Args:
            src_page_indices: the prefiller's pages by position, from position 0.
        """
        if first_run >= stop_run:
            return ()
        positions = np.arange(first_run, stop_run, dtype=np.int64) * self.run_len
        # Of a long prompt's pages only those of these positions: a chunk must not pay for all.
        page_size = self._src.rank.page_size
        first_page, last_page = int(positions[0]) // page_size, int(positions[-1]) // page_size
        src_pages = np.array(src_page_indices[first_page : last_page + 1], np.int64)
        src = _places(self._src.rank, src_pages, positions, first_page * page_size)
        dst = _places(self._dst.rank, self._dst_pages, positions, self.first_position)
        return tuple(
            RankBatch(src_rank=share.src_rank, batch=self._batch(share, src, dst))
            for share in self._shares
        )

    def _batch(self, share: Share, src: _Places, dst: _Places) -> PageBatch:
        src_layout, dst_layout = self._src.rank, self._dst.rank
        src_offset = share.src_rank * self._src.rank_stride_bytes
        dst_offset = share.dst_rank * self._dst.rank_stride_bytes
        if src_layout.page_size == dst_layout.page_size:
            return PageBatch(
                src_pages=src.pages.astype(np.uint32),
                dst_pages=dst.pages.astype(np.uint32),
                page_bytes=share.num_heads * src_layout.head_bytes,
                num_layers=src_layout.num_layers,
                src_offset=src_offset + share.src_head * src_layout.head_bytes,
                dst_offset=dst_offset + share.dst_head * dst_layout.head_bytes,
                src_layer_stride=src_layout.layer_stride_bytes,
                dst_layer_stride=dst_layout.layer_stride_bytes,
                src_page_stride=src_layout.page_bytes,
                dst_page_stride=dst_layout.page_bytes,
            )
        # Runs are the fabric's pages here: every page, head and part is a whole number of them.
        return PageBatch(
            src_pages=self._runs(src_layout, src, share.src_head, share.num_heads),
            dst_pages=self._runs(dst_layout, dst, share.dst_head, share.num_heads),
            page_bytes=self.run_len * src_layout.token_run_bytes,
            num_layers=src_layout.num_layers,
            src_offset=src_offset,
            dst_offset=dst_offset,
            src_layer_stride=src_layout.layer_stride_bytes,
            dst_layer_stride=dst_layout.layer_stride_bytes,
        )

    def _runs(
        self, layout: KvLayout, places: _Places, head: int, num_heads: int
    ) -> NDArray[np.uint32]:
        """Indices of the runs from a layer's start: for each head and part, all positions."""
        runs_per_part = layout.page_size // self.run_len
        parts_per_page = layout.num_kv_heads * layout.num_parts
        first, stop = head * layout.num_parts, (head + num_heads) * layout.num_parts
        in_page = np.arange(first, stop)[:, None] * runs_per_part + places.offsets // self.run_len
        runs = places.pages * (parts_per_page * runs_per_part) + in_page
        return runs.ravel().astype(np.uint32)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where positions lie: page, and token in the page."""

    pages: NDArray[np.int64]
    offsets: NDArray[np.int64]


def _places(
    layout: KvLayout, page_indices: NDArray[np.int64], positions: NDArray[np.int64], first: int
) -> _Places:
    """``page_indices`` begin with the page of position ``first``."""
    from_first = positions - first
    return _Places(page_indices[from_first // layout.page_size], positions % layout.page_size)


class SendCursor:
    """How far a transfer has been handed to the fabric: a run is sent once, when its tokens are all
    computed or when the prompt ends.
    """

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan
        self._next_run = plan.first_position // plan.run_len

    def advance(
        self, src_page_indices: tuple[int, ...], end: int, *, last: bool
    ) -> tuple[RankBatch, ...]:
        """What becomes complete when positions below ``end`` are computed."""
        plan = self._plan
        assert not last or end == plan.num_tokens
        stop = -(-end // plan.run_len) if last else end // plan.run_len
        first, self._next_run = self._next_run, max(self._next_run, stop)
        return plan.batches(src_page_indices, first, stop)
