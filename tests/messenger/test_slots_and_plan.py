"""Slots never repeat a pair early; a plan sends each wanted page once, by position."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pdx.errors import InvalidRequest
from pdx.messenger.plan import SendCursor, TransferPlan, expected_atoms
from pdx.messenger.slots import SlotTable


def test_slot_pairs_come_back_as_late_as_the_design_says() -> None:
    table = SlotTable(num_slots=16, num_generations=4, num_free_kept=6)
    seen: dict[tuple[int, int], int] = {}
    shortest = 10**9
    for turn in range(1000):
        pair = table.take()
        assert pair is not None and pair[0] != 0
        if pair in seen:
            shortest = min(shortest, turn - seen[pair])
        seen[pair] = turn
        table.give_back(pair[0])
    assert shortest >= 6 * 4


def test_slots_run_out_before_the_reserve_is_touched() -> None:
    table = SlotTable(num_slots=10, num_generations=4, num_free_kept=3)
    taken = []
    while (pair := table.take()) is not None:
        taken.append(pair)
    assert len(taken) == 6
    table.give_back(taken[0][0])
    assert table.take() is not None


@given(
    num_tokens=st.integers(1, 70),
    page_size=st.sampled_from([1, 4, 16]),
    first_page=st.integers(0, 4),
    cuts=st.lists(st.integers(1, 69), max_size=6),
)
def test_every_wanted_page_is_sent_once_whatever_the_chunks(
    num_tokens: int, page_size: int, first_page: int, cuts: list[int]
) -> None:
    num_pages = -(-num_tokens // page_size)
    first_page = min(first_page, num_pages - 1)
    dst = tuple(range(100, 100 + num_pages - first_page))
    plan = TransferPlan(
        num_tokens=num_tokens,
        first_position=first_page * page_size,
        dst_page_indices=dst,
        page_size=page_size,
    )
    src = tuple(range(1000, 1000 + num_pages))
    cursor = SendCursor(plan)
    sent = []
    for end in [*sorted({cut for cut in cuts if cut < num_tokens}), num_tokens]:
        for pair in cursor.advance(src, end, last=end == num_tokens):
            page = pair.src_page_idx - 1000
            assert pair.dst_page_idx == 100 + page - first_page, "pages are paired by position"
            complete = min((page + 1) * page_size, num_tokens)
            assert complete <= end, "a page left before its last token was computed"
            sent.append(page)
    assert sent == list(range(first_page, num_pages))
    assert len(sent) * 3 == expected_atoms(num_tokens, plan.first_position, page_size, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"atoms": 11}, "expects 11"),
        ({"first_position": 3}, "not a page's start"),
        ({"first_position": 64}, "not a page's start"),
        ({"pages": (1, 2, 3)}, "expects 8"),
        ({"pages": (1, 2, 3, 3)}, "distinct"),
        ({"pages": (1, 2, 3, 10)}, r"bad: \[10\]"),
    ],
)
def test_a_request_that_does_not_fit_the_plan_is_refused(
    change: dict[str, object], message: str
) -> None:
    fields: dict[str, object] = {"atoms": 8, "first_position": 0, "pages": (1, 2, 3, 4)} | change
    plan = TransferPlan(
        num_tokens=13,
        first_position=fields["first_position"],  # type: ignore[arg-type]
        dst_page_indices=fields["pages"],  # type: ignore[arg-type]
        page_size=4,
    )
    with pytest.raises(InvalidRequest, match=message):
        plan.check(atoms=fields["atoms"], num_layers=2, num_dst_pages=10)  # type: ignore[arg-type]
