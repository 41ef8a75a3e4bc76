"""RequestTable: deltas become model inputs; whatever does not fit together is an InternalError."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdx.errors import InternalError
from pdx.request.batch import Batch, RequestStart, RequestStep
from pdx.request.ids import IdArray
from pdx.request.request import SamplingParams
from pdx.runner.requests import RequestTable

GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
PAGE = 4


def start(request_id: int, tokens: list[int], **changes: Any) -> RequestStart:
    fields: dict[str, Any] = {"num_computed": 0, "first_output_idx": 0, "sampling": GREEDY}
    return RequestStart(request_id=request_id, token_ids=IdArray(tokens), **{**fields, **changes})


def step(request_id: int, num_tokens: int, pages: list[int], **changes: Any) -> RequestStep:
    fields: dict[str, Any] = {"sample": False, **changes}
    return RequestStep(
        request_id=request_id, num_tokens=num_tokens, new_page_indices=pages, **fields
    )


def batch(pass_idx: int, *steps: RequestStep, **changes: Any) -> Batch:
    fields: dict[str, Any] = {"starts": [], "removes": [], **changes}
    return Batch(pass_idx=pass_idx, steps=list(steps), **fields)


@pytest.fixture
def table() -> RequestTable:
    return RequestTable(page_size=PAGE, num_pages=10, vocab_size=100)


def test_prefill_then_decode_of_one_request(table: RequestTable) -> None:
    first = table.begin_pass(
        batch(1, step(7, 5, [3, 9]), starts=[start(7, [10, 11, 12, 13, 14, 15])])
    )
    assert first.batch.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert first.batch.positions.tolist() == [0, 1, 2, 3, 4]
    assert first.batch.token_pages.tolist() == [3, 3, 3, 3, 9]
    assert first.draws == ()
    second = table.begin_pass(batch(2, step(7, 1, [], sample=True)))
    assert second.batch.token_ids.tolist() == [15]
    assert [(d.request_id, d.row, d.output_idx) for d in second.draws] == [(7, 0, 0)]
    table.append_sampled(7, 42)
    third = table.begin_pass(batch(3, step(7, 1, [], sample=True)))
    assert (third.batch.token_ids.tolist(), third.batch.positions.tolist()) == ([42], [6])
    assert third.draws[0].output_idx == 1


def test_a_draft_is_fed_behind_the_last_token_and_stands_where_it_is_drawn(
    table: RequestTable,
) -> None:
    sampling = SamplingParams(max_tokens=9, presence_penalty=1.0)
    first = table.begin_pass(
        batch(1, step(7, 2, [3]), starts=[start(7, [10, 11, 12], sampling=sampling)])
    )
    assert table.next_ids(first.steps[0]) == [11, 12]
    assert table.row_to_draft_from(first.steps[0]) == 1
    table.set_draft(7, 42)
    for pass_idx, drawn, fed, standing in ((2, (42, 50), [12, 42], 2), (3, (60, 9), [50, 42], 1)):
        inputs = table.begin_pass(batch(pass_idx, step(7, 1, [8], sample=True, may_draft=True)))
        assert inputs.batch.token_ids.tolist() == fed
        assert inputs.draws[1].output_idx == inputs.draws[0].output_idx + 1
        assert inputs.draws[1].output_ids == (*inputs.draws[0].output_ids, 42)
        assert table.append_sampled(7, *drawn) == standing
        # The row behind a wrong draft has no token after it, and is of no use.
        assert table.next_ids(inputs.steps[0]) == ([42, 50] if standing == 2 else [60, 0])
        assert table.row_to_draft_from(inputs.steps[0]) == standing - 1
        table.set_draft(7, 42)
    plain = table.begin_pass(batch(4, step(7, 1, [], sample=True)))
    assert (plain.batch.token_ids.tolist(), plain.batch.positions.tolist()) == ([60], [5])


@pytest.mark.parametrize(
    ("sample", "pages", "match"), [(False, [0, 1], "does not sample"), (True, [0], "position 5")]
)
def test_a_draft_out_of_place_ends_the_rank(
    table: RequestTable, sample: bool, pages: list[int], match: str
) -> None:
    wrong = step(7, 1, pages, sample=sample, may_draft=True)
    with pytest.raises(InternalError, match=match):
        table.begin_pass(batch(1, wrong, starts=[start(7, [1, 2, 3, 4], num_computed=3)]))


def test_several_requests_share_a_pass(table: RequestTable) -> None:
    starts = [
        start(1, [10, 11, 12], num_computed=2, first_output_idx=2),
        start(2, list(range(20, 30)), sampling=None),
    ]
    inputs = table.begin_pass(
        batch(1, step(1, 1, [0], sample=True), step(2, 10, [4, 5, 6]), starts=starts)
    )
    assert inputs.batch.token_ids.tolist() == [12, *range(20, 30)]
    assert inputs.batch.positions.tolist() == [2, *range(10)]
    assert [(d.row, d.output_idx) for d in inputs.draws] == [(0, 2)]


def test_output_is_what_follows_the_prompt_also_after_a_preemption(table: RequestTable) -> None:
    sampling = SamplingParams(max_tokens=9, presence_penalty=1.0)
    starts = [
        start(1, [10, 11, 12], sampling=sampling),
        start(2, [10, 11, 12], first_output_idx=2, sampling=sampling),
        start(3, [10, 11, 12], first_output_idx=2),
    ]
    steps = [step(i, 3, [i], sample=True) for i in (1, 2, 3)]
    inputs = table.begin_pass(batch(1, *steps, starts=starts))
    assert [d.output_ids for d in inputs.draws] == [(), (11, 12), ()]
    assert [d.rules is None for d in inputs.draws] == [False, False, True]
    for request_id in (1, 2):
        table.append_sampled(request_id, 13)
    steps = [step(i, 1, [], sample=True) for i in (1, 2)]
    inputs = table.begin_pass(batch(2, *steps))
    assert [d.output_ids for d in inputs.draws] == [(13,), (11, 12, 13)]


@pytest.mark.parametrize(
    ("next_token_id", "expected"),
    [
        (None, [(1, (11, 12)), (3, (13, 14)), None]),
        (99, [(1, (11, 12)), (3, (13, 14)), (5, (99,))]),
    ],
)
def test_each_token_of_a_prompt_is_scored_once(
    table: RequestTable,
    next_token_id: int | None,
    expected: list[tuple[int, tuple[int, ...]] | None],
) -> None:
    """The row of a position scores the token after it; the last one only where that is known."""
    scored = start(1, [10, 11, 12, 13, 14], sampling=None, prompt_logprobs=3)
    scored = msgspec.structs.replace(scored, next_token_id=next_token_id)
    starts = [start(2, [1, 2]), scored]
    got = []
    for pass_idx, num_tokens in enumerate([2, 2, 1], start=1):
        steps = [step(1, num_tokens, [pass_idx])]
        if pass_idx == 1:
            steps.insert(0, step(2, 1, [7]))
        inputs = table.begin_pass(batch(pass_idx, *steps, starts=starts))
        assert all((s.request_id, s.num_top) == (1, 3) for s in inputs.score_spans)
        assert [s.row for s in inputs.score_spans] in ([], [1 if pass_idx == 1 else 0])
        got += [(s.first_position, s.target_ids) for s in inputs.score_spans] or [None]
        starts = []
    assert got == expected


def test_output_is_not_scored(table: RequestTable) -> None:
    scored = start(1, [10, 11, 12, 13], first_output_idx=1, prompt_logprobs=0)
    inputs = table.begin_pass(batch(1, step(1, 3, [1]), starts=[scored]))
    assert [s.target_ids for s in inputs.score_spans] == [(11, 12)]
    inputs = table.begin_pass(batch(2, step(1, 1, [], sample=True)))
    assert inputs.score_spans == ()


def test_requests_that_decode_come_before_chunks() -> None:
    """A step with a draft has two rows, and may stand behind a chunk in the primary's batch."""
    table = RequestTable(page_size=PAGE, num_pages=10, vocab_size=100, decode_rows=2)
    starts = [start(1, [10, 11, 12]), start(2, list(range(20, 30)), sampling=None)]
    table.begin_pass(batch(1, step(1, 2, [3]), starts=starts))
    table.set_draft(1, 42)
    inputs = table.begin_pass(
        batch(2, step(2, 3, [5]), step(1, 1, [7], sample=True, may_draft=True))
    )
    assert inputs.batch.token_ids.tolist() == [12, 42, 20, 21, 22]
    assert [group.rows for group in inputs.batch.groups] == [slice(0, 2), slice(2, 5)]
    assert [draw.row for draw in inputs.draws] == [0, 1]
    assert [(each.request_id, each.row) for each in inputs.steps] == [(1, 0), (2, 2)]


def test_pages_of_a_request_stay_where_they_are_while_others_come_and_go() -> None:
    table = RequestTable(page_size=PAGE, num_pages=100, vocab_size=100)
    starts = [start(1, list(range(80))), start(2, [1] * 80)]
    table.begin_pass(batch(1, step(1, 3, [3]), step(2, 3, [50]), starts=starts))
    new = [start(3, [7] * 80)]
    for pass_idx in range(2, 22):
        steps = [step(1, 4, [2 + pass_idx])] if pass_idx < 19 else []
        inputs = table.begin_pass(
            batch(
                pass_idx,
                step(3, 1, [60 + pass_idx]),
                *steps,
                starts=new if pass_idx % 2 == 0 else [],
                removes=[3] if pass_idx > 2 and pass_idx % 2 == 0 else [],
            )
        )
        pages = [p.tolist() for group in inputs.batch.groups for *_, p in group.each(PAGE)]
        assert pages[0] == [60 + pass_idx // 2 * 2]
        if steps:
            assert pages[1] == list(range(3, 3 + len(pages[1])))
            assert len(pages[1]) == pass_idx


def test_sampling_row_is_the_last_of_its_step(table: RequestTable) -> None:
    inputs = table.begin_pass(
        batch(
            1,
            step(1, 3, [0], sample=True),
            step(2, 2, [1], sample=True),
            starts=[start(1, [1, 2, 3]), start(2, [4, 5])],
        )
    )
    assert [d.row for d in inputs.draws] == [2, 4]


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, ((5, 1),)), (3, ((5, 3),)), (4, ()), (5, ((6, 1),)), (8, ())]
)
def test_only_the_unused_end_of_the_last_page_is_zeroed(
    table: RequestTable, num_tokens: int, expected: tuple[tuple[int, int], ...]
) -> None:
    one = step(1, num_tokens, [5, 6], zero_last_page=True)
    inputs = table.begin_pass(batch(1, one, starts=[start(1, list(range(8)))]))
    assert inputs.zero_tails == expected


def test_removed_id_may_come_back_in_the_same_batch(table: RequestTable) -> None:
    table.begin_pass(batch(1, step(1, 2, [5]), starts=[start(1, [1, 2, 3])]))
    again = start(1, [1, 2, 3, 50], first_output_idx=1)
    inputs = table.begin_pass(batch(2, step(1, 4, [6], sample=True), starts=[again], removes=[1]))
    assert inputs.batch.token_pages.tolist() == [6, 6, 6, 6]
    assert inputs.draws[0].output_idx == 1
    table.begin_pass(batch(3, removes=[1]))
    assert len(table) == 0


def test_pass_without_steps_has_no_rows(table: RequestTable) -> None:
    inputs = table.begin_pass(batch(1))
    groups = [len(group) for group in inputs.batch.groups]
    assert (len(inputs.batch), groups, inputs.draws) == (0, [0, 0], ())


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (batch(1), "pass 1 came after pass 1"),
        (batch(3), "pass 3"),
        (batch(2, step(9, 1, [])), "request 9"),
        (batch(2, removes=[9]), "request 9"),
        (batch(2, starts=[start(1, [1])]), "started twice"),
        (batch(2, starts=[start(2, [])]), "0 of its 0 tokens"),
        (batch(2, starts=[start(2, [1, 2], num_computed=2)]), "2 of its 2 tokens"),
        (batch(2, starts=[start(2, [1, 100])]), "vocabulary"),
        (batch(2, starts=[start(2, [2**32 - 1])]), "vocabulary"),
        (batch(2, starts=[start(2, [1], next_token_id=100)]), "vocabulary"),
        (batch(2, starts=[start(2, [1, 2], first_output_idx=2)]), "2 output tokens among its 2"),
        (batch(2, starts=[start(2, [1, 2], first_output_idx=-1)]), "-1 output tokens"),
        (batch(2, step(1, 0, [])), "0 tokens"),
        (batch(2, step(1, 5, [])), "run 5 tokens from position 2 of 6"),
        (batch(2, step(1, 3, [])), "1 pages of 4"),
        (batch(2, step(1, 1, [10])), "of 10"),
        (batch(2, step(1, 1, [-1])), "of 10"),
        (batch(2, step(1, 1, []), step(1, 1, [])), "two steps"),
        (batch(2, step(1, 1, [], sample=True)), "cannot sample at position 3"),
        (
            batch(2, step(2, 1, [1], sample=True), starts=[start(2, [1], sampling=None)]),
            "cannot sample",
        ),
    ],
)
def test_batches_that_do_not_fit_are_refused(
    table: RequestTable, broken: Batch, named: str
) -> None:
    table.begin_pass(batch(1, step(1, 2, [5]), starts=[start(1, [1, 2, 3, 4, 5, 6])]))
    with pytest.raises(InternalError, match=named):
        table.begin_pass(broken)
