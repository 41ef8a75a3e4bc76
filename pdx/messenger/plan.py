"""The sharding plan: which bytes of a request go from which rank to which, as how many atoms. Pure.

Both sides compute it from the two nodes' layouts, so they agree on what is counted. A request's
token positions are cut into *runs* of tokens that lie in one page on both sides: whole pages where
the page sizes are equal, else their greatest common divisor. A decoder's rank gets the heads that
it holds, each from one prefiller's rank that holds them too (:class:`Share`). An *atom* is

- with equal page sizes: a share's heads of one page of one layer, contiguous on both sides;
- else: one run of one part (K or V) of one head of one layer.

Layers that draft lack a prompt's last position, so they have a range of their own. A node with data
parallel attention is as many destinations as it has groups of ranks.

Everything goes by position, so nothing is ever paired by its place in a list. Plans name pages and
layers' strides; the fabric's worker expands layers. docs/sharding.md draws each case.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdx.errors import InvalidRequest
from pdx.fabric import PageBatch
from pdx.kv.layout import KvLayout, NodeLayout

__all__ = [
    "LayerRange",
    "RankBatch",
    "SendCursor",
    "Share",
    "TransferPlan",
    "atoms_by_rank",
    "layer_ranges",
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

    #: Counted over all groups of ranks.
    src_rank: int
    #: The layer of the model that is the batch's first one.
    first_layer: int
    batch: PageBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRange:
    """Neighbouring layers of a group, and the positions below which their KV moves."""

    group: str
    first_layer: int
    num_layers: int
    num_tokens: int


def shares(src: NodeLayout, dst: NodeLayout, transfer_id: int) -> tuple[Share, ...]:
    """Which source rank writes which heads for which destination rank: each head of each once.

    Ranks that hold all heads once are a set. Where the source has several, each transfer shuffles
    them and deals them out to the destination's sets, so that all of them (and their network cards)
    work, whatever comes in turn.
    """
    found = []
    order = _shuffled(src.num_replicas, transfer_id)
    for dst_rank in range(dst.tp_size):
        wanted = dst.heads(dst_rank)
        src_replica = order[dst_rank % dst.num_replicas % src.num_replicas]
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


def _shuffled(count: int, seed: int) -> list[int]:
    """``range(count)`` in an order that is equal on all hosts and in all versions of Python."""
    if count == 1:
        return [0]
    return sorted(
        range(count),
        key=lambda i: hashlib.blake2b(b"%d %d" % (seed, i), digest_size=8).digest(),
    )


def layer_ranges(layout: NodeLayout, num_tokens: int) -> tuple[LayerRange, ...]:
    """What is wanted of a prompt of ``num_tokens``, its last one (which is decoded) apart."""
    num_draft = layout.rank.num_draft_layers
    num_target = layout.rank.num_layers - num_draft
    group = layout.rank.group
    target = LayerRange(group=group, first_layer=0, num_layers=num_target, num_tokens=num_tokens)
    if not num_draft:
        return (target,)
    draft = LayerRange(
        group=group, first_layer=num_target, num_layers=num_draft, num_tokens=num_tokens - 1
    )
    return (target, draft)


def _run_len(src: NodeLayout, dst: NodeLayout) -> int:
    return math.gcd(src.rank.page_size, dst.rank.page_size)


def _num_layer_runs(src: NodeLayout, dst: NodeLayout, first_position: int, num_tokens: int) -> int:
    """Runs of all layers together."""
    run_len = _run_len(src, dst)
    first_run = first_position // run_len
    return sum(
        each.num_layers * max(0, -(-each.num_tokens // run_len) - first_run)
        for each in layer_ranges(src, num_tokens)
    )


def atoms_by_rank(
    src: NodeLayout,
    dst: NodeLayout,
    transfer_id: int,
    first_position: int,
    num_tokens: int,
) -> list[int]:
    """Atoms that each rank of the destination counts for positions
    ``first_position <= i < num_tokens``.

    Args:
        first_position: a multiple of the destination's page size.
    """
    num_runs = _num_layer_runs(src, dst, first_position, num_tokens)
    equal = src.rank.page_size == dst.rank.page_size
    atoms = [0] * dst.tp_size
    for share in shares(src, dst, transfer_id):
        atoms[share.dst_rank] += num_runs * (1 if equal else share.num_heads * src.rank.num_parts)
    return atoms


def transfer_bytes(src: NodeLayout, dst: NodeLayout, first_position: int, num_tokens: int) -> int:
    """What moves for these positions: whole runs, for each destination rank."""
    num_runs = _num_layer_runs(src, dst, first_position, num_tokens)
    run_bytes = _run_len(src, dst) * dst.rank.page_bytes // dst.rank.page_size
    return dst.tp_size * num_runs * run_bytes


class TransferPlan:
    """One transfer as both sides agree on it.

    Args:
        dst_page_indices: the decoder's pages for positions ``first_position`` onwards, in order.
        src_group, dst_group: the groups of ranks that compute and want it.
    """

    def __init__(
        self,
        src: NodeLayout,
        dst: NodeLayout,
        *,
        transfer_id: int,
        num_tokens: int,
        first_position: int,
        dst_page_indices: Sequence[int],
        src_group: int = 0,
        dst_group: int = 0,
    ) -> None:
        assert 0 <= src_group < src.dp_size and 0 <= dst_group < dst.dp_size
        self._src, self._dst = src, dst
        self._src_group, self._dst_group = src_group, dst_group
        self._transfer_id = transfer_id
        self.num_tokens = num_tokens
        self.first_position = first_position
        self._dst_pages = np.array(dst_page_indices, np.int64)
        self._shares = shares(src, dst, transfer_id)
        self.run_len = _run_len(src, dst)
        self.ranges = layer_ranges(src, num_tokens)

    def check_atoms(self, atoms: list[int]) -> None:
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
            self._src,
            self._dst,
            self._transfer_id,
            self.first_position,
            self.num_tokens,
        )
        num_pages = -(-self.num_tokens // page_size) - self.first_position // page_size
        pages = self._dst_pages
        if planned != atoms or len(pages) != num_pages:
            raise InvalidRequest(
                f"the plan has {planned} atoms by rank in {num_pages} pages, the decoder expects "
                f"{atoms} in {len(pages)} pages",
                param="atoms_by_rank",
            )
        ordered = np.sort(pages)
        is_in_range = ordered[0] >= 0 and ordered[-1] < num_dst_pages
        if not is_in_range or (ordered[1:] == ordered[:-1]).any():
            bad = pages[(pages < 0) | (pages >= num_dst_pages)]
            raise InvalidRequest(
                f"destination pages must be distinct and below {num_dst_pages}; "
                f"bad: {bad[:4].tolist()}",
                param="page_indices",
            )

    def batches(
        self, layers: LayerRange, src_page_indices: tuple[int, ...], first_run: int, stop_run: int
    ) -> tuple[RankBatch, ...]:
        """The writes of runs ``first_run <= i < stop_run`` of these layers.

        Args:
            src_page_indices: the prefiller's pages by position, from position 0.
        """
        if first_run >= stop_run:
            return ()
        # Only the pages of these runs are looked at: a chunk must not pay for a whole long prompt.
        page_size = self._src.rank.page_size
        if page_size == self._dst.rank.page_size:
            first_run_there = self.first_position // page_size
            src_pages = np.array(src_page_indices[first_run:stop_run], np.uint32)
            dst_pages = self._dst_pages[first_run - first_run_there : stop_run - first_run_there]
            src, dst = _Places(src_pages), _Places(dst_pages.astype(np.uint32))
        else:
            positions = np.arange(first_run, stop_run, dtype=np.int64) * self.run_len
            first_page, last_page = int(positions[0]) // page_size, int(positions[-1]) // page_size
            pages = np.array(src_page_indices[first_page : last_page + 1], np.int64)
            src = _places(self._src.rank, pages, positions, first_page * page_size)
            dst = _places(self._dst.rank, self._dst_pages, positions, self.first_position)
        return tuple(
            RankBatch(
                src_rank=self._word(share),
                first_layer=layers.first_layer,
                batch=self._batch(share, layers, src, dst),
            )
            for share in self._shares
        )

    def _word(self, share: Share) -> int:
        return self._src_group * self._src.tp_size + share.src_rank

    def _src_offset(self, share: Share) -> int:
        return self._src.rank_offset_bytes(self._src_group, share.src_rank)

    def _dst_offset(self, share: Share) -> int:
        return self._dst.rank_offset_bytes(self._dst_group, share.dst_rank)

    def _batch(self, share: Share, layers: LayerRange, src: _Places, dst: _Places) -> PageBatch:
        src_layout, dst_layout = self._src.rank, self._dst.rank
        src_offset = self._src_offset(share) + layers.first_layer * src_layout.layer_stride_bytes
        dst_offset = self._dst_offset(share) + layers.first_layer * dst_layout.layer_stride_bytes
        if src_layout.page_size == dst_layout.page_size:
            return PageBatch(
                src_pages=src.pages,
                dst_pages=dst.pages,
                page_bytes=share.num_heads * src_layout.head_bytes,
                num_layers=layers.num_layers,
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
            num_layers=layers.num_layers,
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
        assert places.offsets is not None
        in_page = np.arange(first, stop)[:, None] * runs_per_part + places.offsets // self.run_len
        runs: NDArray[np.int64] = places.pages * (parts_per_page * runs_per_part) + in_page
        return runs.ravel().astype(np.uint32)


class _Places(NamedTuple):
    """Where positions lie: page, and token in the page, where runs are not whole pages."""

    pages: NDArray[Any]
    offsets: NDArray[np.int64] | None = None


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
        self._next_run = dict.fromkeys(plan.ranges, plan.first_position // plan.run_len)

    def advance(
        self, src_page_indices: tuple[int, ...], end: int, *, last: bool
    ) -> tuple[RankBatch, ...]:
        """What becomes complete when positions below ``end`` are computed."""
        plan = self._plan
        assert not last or end == plan.num_tokens
        batches: tuple[RankBatch, ...] = ()
        for layers, first in self._next_run.items():
            stop = -(-layers.num_tokens // plan.run_len) if last else end // plan.run_len
            self._next_run[layers] = max(first, stop)
            batches += plan.batches(layers, src_page_indices, first, stop)
        return batches
