"""Every wanted byte is written once, from the same head and token, whatever the two layouts are.

The oracle is memory itself: each byte of a source holds who it is (layer, head, part, position,
place in the token), a plan's batches are carried out as the fabric does, and the destination must
hold exactly what it asked for.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from pdx.errors import InvalidRequest
from pdx.kv.layout import KvLayout, NodeLayout, kv_heads_of_rank
from pdx.messenger.plan import (
    RankBatch,
    SendCursor,
    TransferPlan,
    atoms_by_rank,
    shares,
    transfer_bytes,
)

LAYERS, HEAD_DIM = 3, 2
SIZES, PAGE_SIZES = [1, 2, 4, 8], [1, 16, 64, 128]
#: What the identity of a byte is made of: layer, head, part, position, place in the token.
BASES = (LAYERS, 8, 2, 1 << 10, HEAD_DIM)


def node(
    tp_size: int,
    num_heads: int,
    page_size: int,
    num_pages: int,
    num_parts: int = 2,
    alignment: int = 4096,
    num_draft_layers: int = 0,
    dp_size: int = 1,
) -> NodeLayout:
    """A small node; one byte a value."""
    rank = KvLayout(
        num_layers=LAYERS,
        num_kv_heads=len(kv_heads_of_rank(num_heads, tp_size, 0)),
        head_dim=HEAD_DIM,
        page_size=page_size,
        num_pages=num_pages,
        itemsize=1,
        num_parts=num_parts,
        num_draft_layers=num_draft_layers,
    )
    return NodeLayout(
        rank=rank,
        tp_size=tp_size,
        num_kv_heads=num_heads,
        alignment=alignment,
        dp_size=dp_size,
    )


@dataclass(frozen=True)
class Case:
    """One transfer."""

    src: NodeLayout
    dst: NodeLayout
    transfer_id: int
    num_tokens: int
    first_position: int
    src_pages: list[int]
    dst_pages: list[int]
    #: Where chunks end.
    ends: list[int]
    src_group: int
    dst_group: int

    @property
    def num_draft_layers(self) -> int:
        return self.src.rank.num_draft_layers

    def plan(self) -> TransferPlan:
        return TransferPlan(
            self.src,
            self.dst,
            transfer_id=self.transfer_id,
            num_tokens=self.num_tokens,
            first_position=self.first_position,
            dst_page_indices=self.dst_pages,
            src_group=self.src_group,
            dst_group=self.dst_group,
        )

    def wanted_len(self, layer: int) -> int:
        """Positions below this one are wanted of a layer."""
        return self.num_tokens - (layer >= LAYERS - self.num_draft_layers)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_heads = draw(st.sampled_from(SIZES))
    parts = draw(st.sampled_from([1, 2]))
    src_page, dst_page = (draw(st.sampled_from(PAGE_SIZES)) for _ in "sd")
    num_tokens = draw(st.integers(1, 150))
    num_dst = -(-num_tokens // dst_page)
    first_page = draw(st.integers(0, num_dst - 1))
    num_src = -(-num_tokens // src_page)
    num_draft_layers = draw(st.integers(0, LAYERS - 1))
    nodes, groups = [], []
    for page, num_pages in ((src_page, num_src + 2), (dst_page, num_dst + 2)):
        alignment = draw(st.sampled_from([4096, 16384]))
        tp_size, dp_size = draw(st.sampled_from(SIZES)), draw(st.integers(1, 3))
        nodes.append(
            node(tp_size, num_heads, page, num_pages, parts, alignment, num_draft_layers, dp_size)
        )
        groups.append(draw(st.integers(0, dp_size - 1)))
    cuts = draw(st.lists(st.integers(1, num_tokens), max_size=4))
    return Case(
        *nodes,
        draw(st.integers(1, 20)),
        num_tokens,
        first_page * dst_page,
        draw(st.permutations(range(num_src + 2)))[:num_src],
        draw(st.permutations(range(num_dst + 2)))[: num_dst - first_page],
        sorted({*cuts, num_tokens}),
        *groups,
    )


def identities(
    layout: NodeLayout, pages: list[int], first_position: int, group: int
) -> NDArray[np.int64]:
    """For each byte of the node's memory who it is, -1 for what belongs to no position of the
    group.
    """
    rank = layout.rank
    size = rank.page_size
    memory = np.full(layout.total_bytes, -1, np.int64)
    for rank_idx in range(layout.tp_size):
        start = layout.rank_offset_bytes(group, rank_idx)
        shape = (LAYERS, rank.num_pages, rank.num_kv_heads, rank.num_parts, size, HEAD_DIM)
        view = memory[start : start + rank.total_bytes].reshape(shape)
        heads = np.array(layout.heads(rank_idx))
        for place, page in enumerate(pages):
            positions = first_position + place * size + np.arange(size)
            coordinates = np.ix_(
                np.arange(LAYERS), heads, np.arange(rank.num_parts), positions, np.arange(HEAD_DIM)
            )
            view[:, page] = np.ravel_multi_index(coordinates, BASES)
    return memory


def is_below(case: Case, identity: NDArray[np.int64], end: int) -> NDArray[np.bool_]:
    """Whether a byte of KV belongs to a position that is wanted of its layer, and is below
    ``end``.
    """
    is_kv = identity >= 0
    layers, _, _, positions, _ = np.unravel_index(np.where(is_kv, identity, 0), BASES)
    wanted = np.array([case.wanted_len(layer) for layer in range(LAYERS)])
    below: NDArray[np.bool_] = is_kv & (positions < np.minimum(wanted[layers], end))
    return below


def carry_out(
    batches: list[RankBatch], source: NDArray[np.int64], target: NDArray[np.int64]
) -> list[tuple[int, int]]:
    """Do what the fabric's worker does; the (offset, length) of each atom in the target."""
    written = []
    for each in batches:
        batch = each.batch
        src_stride = batch.src_page_stride or batch.page_bytes
        dst_stride = batch.dst_page_stride or batch.page_bytes
        for layer in range(batch.num_layers):
            src_start = batch.src_offset + layer * batch.src_layer_stride
            dst_start = batch.dst_offset + layer * batch.dst_layer_stride
            for src_page, dst_page in zip(
                batch.src_pages.tolist(), batch.dst_pages.tolist(), strict=True
            ):
                src = src_start + src_page * src_stride
                dst = dst_start + dst_page * dst_stride
                target[dst : dst + batch.page_bytes] = source[src : src + batch.page_bytes]
                written.append((dst, batch.page_bytes))
    return written


def send_all(case: Case, computed: list[tuple[int, int]] | None = None) -> list[RankBatch]:
    """All batches, chunk by chunk."""
    plan = case.plan()
    cursor = SendCursor(plan)
    sent: list[RankBatch] = []
    for end in case.ends:
        sent += cursor.advance(tuple(case.src_pages), end, last=end == case.num_tokens)
        if computed is not None:
            computed.append((len(sent), end))
    return sent


def check_transfer(case: Case) -> None:
    """Carry a transfer out and look at every byte."""
    source = identities(case.src, case.src_pages, 0, case.src_group)
    wanted = identities(case.dst, case.dst_pages, case.first_position, case.dst_group)
    target = np.full(case.dst.total_bytes, -2, np.int64)
    written = carry_out(send_all(case), source, target)

    times = np.zeros(case.dst.total_bytes, np.int64)
    for offset, length in written:
        times[offset : offset + length] += 1
    must = is_below(case, wanted, case.num_tokens)
    assert (times[must] == 1).all()
    assert times.max() <= 1, "bytes past the wanted positions are written once at most"
    assert (times[wanted < 0] == 0).all(), "outside of the leased pages"
    assert (target[must] == wanted[must]).all(), "from the same layer, head, part and position"

    by_rank = [0] * case.dst.tp_size
    for offset, _ in written:
        rank_idx = offset // case.dst.rank_stride_bytes
        by_rank[rank_idx - case.dst_group * case.dst.tp_size] += 1
    span = (case.first_position, case.num_tokens)
    declared = atoms_by_rank(case.src, case.dst, case.transfer_id, *span)
    assert by_rank == declared, "both sides count the same atoms"
    case.plan().check_atoms(declared)
    moved = sum(length for _, length in written)
    assert moved == transfer_bytes(case.src, case.dst, *span)


@settings(max_examples=60)
@given(case=cases())
def test_each_wanted_byte_is_written_once_and_no_other_page_is_touched(case: Case) -> None:
    check_transfer(case)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_heads", SIZES)
def test_each_wanted_byte_is_written_once_in_every_cell(num_heads: int) -> None:
    """Ranks, page sizes, a prefix or none, chunks that divide the page or not, drafts or none."""
    cells = itertools.product(SIZES, SIZES, PAGE_SIZES, PAGE_SIZES, [0, 1], [48, 27], [0, 1])
    for src_tp, dst_tp, src_page, dst_page, first_page, chunk, num_draft in cells:
        num_tokens = 130
        num_src, num_dst = -(-num_tokens // src_page), -(-num_tokens // dst_page)
        common = {"num_draft_layers": num_draft, "dp_size": 1 + num_draft}
        case = Case(
            node(src_tp, num_heads, src_page, num_src, **common),
            node(dst_tp, num_heads, dst_page, num_dst, **common),
            src_tp + dst_tp,
            num_tokens,
            first_page * dst_page,
            list(reversed(range(num_src))),
            list(range(num_dst - first_page)),
            [*range(chunk, num_tokens, chunk), num_tokens],
            num_draft,
            num_draft,
        )
        check_transfer(case)


@settings(max_examples=20)
@given(case=cases())
def test_nothing_leaves_before_its_tokens_are_computed(case: Case) -> None:
    marks: list[tuple[int, int]] = []
    batches = send_all(case, marks)
    whole = identities(case.src, case.src_pages, 0, case.src_group)
    begin = 0
    for stop, end in marks:
        source = np.full(case.src.total_bytes, -1, np.int64)
        source[is_below(case, whole, end)] = 1
        if end == case.num_tokens:
            source[whole >= 0] = 1  # zeroed before the last chunk
        target = np.zeros(case.dst.total_bytes, np.int64)
        carry_out(batches[begin:stop], source, target)
        assert (target >= 0).all(), "a token was sent that no pass had computed"
        begin = stop


@given(case=cases())
@settings(max_examples=20)
def test_each_layer_waits_for_its_own_step(case: Case) -> None:
    for each in send_all(case):
        layout = case.src.rank
        assert each.src_rank // case.src.tp_size == case.src_group
        first = each.batch.src_offset - each.src_rank * case.src.rank_stride_bytes
        assert first // layout.layer_stride_bytes == each.first_layer


@pytest.mark.parametrize("src_tp", SIZES)
@pytest.mark.parametrize("dst_tp", SIZES)
def test_all_replicas_of_a_head_are_chosen_alike_often(src_tp: int, dst_tp: int) -> None:
    src, dst = node(src_tp, 2, 16, 4), node(dst_tp, 2, 16, 4)
    writers: Counter[int] = Counter()
    num_transfers = 400
    for transfer_id in range(num_transfers):
        found = shares(src, dst, transfer_id)
        heads = [(s.dst_rank, s.dst_head + i) for s in found for i in range(s.num_heads)]
        assert len(set(heads)) == len(heads) == dst_tp * dst.rank.num_kv_heads
        sets = Counter(share.src_rank % src.num_replicas for share in found)
        num_working = min(src.num_replicas, dst.num_replicas)
        assert len(sets) == num_working, "as many of them as can work do"
        writers.update({share.src_rank for share in found})
    expected = num_transfers * num_working / src.num_replicas
    assert set(writers) == set(range(src_tp))
    assert all(0.75 * expected < count < 1.25 * expected for count in writers.values())


def test_which_replica_sends_is_written_down_here() -> None:
    """Both sides choose by the transfer's number alone: other versions of pdx must agree."""
    src, dst = node(8, 1, 16, 4), node(1, 1, 16, 4)
    chosen = [
        share.src_rank for transfer_id in range(12) for share in shares(src, dst, transfer_id)
    ]
    assert chosen == [7, 5, 2, 2, 4, 5, 6, 7, 5, 7, 4, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"atoms": [6, 6, 13]}, r"decoder expects \[6, 6, 13\]"),
        ({"first_position": 3}, "not a page's start"),
        ({"first_position": 64}, "not a page's start"),
        ({"num_tokens": 0}, "no tokens"),
        ({"pages": [1, 2, 3]}, "3 pages"),
        ({"pages": [1, 2, 3, 3]}, "distinct"),
        ({"pages": [1, 2, 3, 10]}, r"bad: \[10\]"),
        ({"pages": [1, 2, 3, -1]}, r"bad: \[-1\]"),
    ],
)
def test_a_request_that_does_not_fit_the_plan_is_refused(
    change: dict[str, object], message: str
) -> None:
    fields: dict[str, object] = {
        "atoms": [12, 12],
        "first_position": 0,
        "pages": [1, 2, 3, 4],
        "num_tokens": 13,
    } | change
    plan = TransferPlan(
        node(1, 2, 4, 10),
        node(2, 2, 4, 10),
        transfer_id=1,
        num_tokens=fields["num_tokens"],  # type: ignore[arg-type]
        first_position=fields["first_position"],  # type: ignore[arg-type]
        dst_page_indices=fields["pages"],  # type: ignore[arg-type]
    )
    with pytest.raises(InvalidRequest, match=message):
        plan.check_atoms(fields["atoms"])  # type: ignore[arg-type]
