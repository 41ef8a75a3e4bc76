"""The scheduler against a rank that is a dictionary: what it sends is complete, in order, and
within bounds.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdx.errors import InvalidRequest
from pdx.kv.pages import PagePool, Proof, Use
from pdx.request.batch import Batch, SampledToken, StepOutput
from pdx.request.request import FinishReason, SamplingParams
from pdx.scheduler.passes import ScheduledPass
from pdx.scheduler.request import PromptScoring, RequestUpdate
from pdx.scheduler.scheduler import Scheduler, SchedulerLimits

EOS = 99


class DictRank:
    """Follows batches as a rank does, and checks that they make sense."""

    def __init__(self, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}
        self.pass_idx = 0

    def run(self, batch: Batch) -> StepOutput:
        assert batch.pass_idx == self.pass_idx + 1
        self.pass_idx = batch.pass_idx
        for request_id in batch.removes:
            del self.tokens[request_id], self.computed[request_id], self.pages[request_id]
        for start in batch.starts:
            assert start.request_id not in self.tokens
            self.tokens[start.request_id] = list(start.token_ids)
            self.computed[start.request_id] = start.num_computed
            self.pages[start.request_id] = []
        sampled = []
        num_drafts = 0
        for step in batch.steps:
            request_id = step.request_id
            self.pages[request_id] += step.new_page_indices
            self.computed[request_id] += step.num_tokens
            end = self.computed[request_id]
            assert end <= len(self.tokens[request_id])
            assert len(self.pages[request_id]) * self.page_size >= end
            if step.sample:
                assert end == len(self.tokens[request_id])
                token = self.next_token(request_id)
                self.tokens[request_id].append(token)
                sampled.append(SampledToken(request_id=request_id, token_id=token, logprob=0.0))
            if step.may_draft:
                assert step.sample and len(self.pages[request_id]) * self.page_size > end
                num_drafts += 1
                if self.next_token(request_id) % 3:  # the draft was right: one more stands
                    token = self.next_token(request_id)
                    self.tokens[request_id].append(token)
                    self.computed[request_id] += 1
                    sampled.append(SampledToken(request_id=request_id, token_id=token, logprob=0.0))
        every = [page for pages in self.pages.values() for page in pages]
        assert len(set(every)) == len(every) and all(0 <= p < self.num_pages for p in every)
        return StepOutput(
            pass_idx=batch.pass_idx, tokens=sampled, num_drafts=num_drafts, pass_s=0.0
        )

    def next_token(self, request_id: int) -> int:
        """A function of the request alone, so that a resumed request repeats itself."""
        return (sum(self.tokens[request_id]) * 7 + len(self.tokens[request_id])) % 50


def make(
    *,
    page_size: int = 4,
    num_pages: int = 16,
    chunk_len: int = 8,
    max_num_seqs: int = 8,
    reserve: int = 4,
    drafts: bool = False,
) -> tuple[Scheduler, DictRank]:
    limits = SchedulerLimits(
        page_size=page_size,
        chunk_len=chunk_len,
        max_num_seqs=max_num_seqs,
        reserve_output_len=reserve,
        drafts=drafts,
    )
    return Scheduler(limits, PagePool(num_pages)), DictRank(page_size, num_pages)


def step(scheduler: Scheduler, rank: DictRank) -> list[RequestUpdate] | None:
    """Admit, start what was admitted, run one pass."""
    for request in scheduler.admit():
        scheduler.start(request.request_id)
    scheduled = scheduler.schedule()
    if scheduled is None:
        return None
    return scheduler.postprocess(rank.run(scheduled.batch))


def run_all(scheduler: Scheduler, rank: DictRank) -> dict[int, list[int]]:
    outputs: dict[int, list[int]] = {}
    for _ in range(10_000):
        updates = step(scheduler, rank)
        if updates is None:
            return outputs
        for update in updates:
            outputs.setdefault(update.request_id, []).extend(update.token_ids)
    raise AssertionError("the scheduler never came to rest")


def sampling(max_tokens: int, *stop: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop)


@pytest.mark.parametrize("prompt_len", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17])
def test_prompt_is_prefilled_in_chunks_and_its_last_token_by_a_decode_step(prompt_len: int) -> None:
    scheduler, rank = make()
    scheduler.submit(1, list(range(1, prompt_len + 1)), sampling(1))
    sizes = []
    while (scheduled := _next(scheduler)) is not None:
        sizes += [s.num_tokens for s in scheduled.batch.steps]
        scheduler.postprocess(rank.run(scheduled.batch))
    full, rest = divmod(prompt_len - 1, 8)
    assert sizes == [8] * full + ([rest] if rest else []) + [1]
    assert scheduler.pool.counts().at_rest


def _next(scheduler: Scheduler) -> ScheduledPass | None:
    for request in scheduler.admit():
        scheduler.start(request.request_id)
    return scheduler.schedule()


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_exactly_max_tokens_come_out(max_tokens: int, drafts: bool) -> None:
    scheduler, rank = make(drafts=drafts)
    scheduler.submit(1, [1, 2, 3], sampling(max_tokens))
    assert len(run_all(scheduler, rank)[1]) == max_tokens


def test_stop_token_ends_the_output_and_is_part_of_it() -> None:
    scheduler, rank = make()
    scheduler.submit(1, [1, 2, 3], sampling(10))
    free_run = run_all(scheduler, rank)[1]
    scheduler, rank = make()
    scheduler.submit(1, [1, 2, 3], sampling(10, free_run[2]))
    while not (updates := step(scheduler, rank)) or updates[-1].finish_reason is None:
        pass
    assert updates[-1].finish_reason is FinishReason.STOP
    assert updates[-1].token_ids == [free_run[2]]


def test_drafts_change_no_text_and_save_passes() -> None:
    plain, plain_rank = make()
    plain.submit(1, [1, 2, 3], sampling(40))
    free_run = run_all(plain, plain_rank)[1]
    scheduler, rank = make(drafts=True)
    scheduler.submit(1, [1, 2, 3], sampling(40))
    assert run_all(scheduler, rank)[1] == free_run
    assert rank.pass_idx < plain_rank.pass_idx - 5
    assert scheduler.num_right_drafts == plain_rank.pass_idx - rank.pass_idx
    assert scheduler.num_right_drafts < scheduler.num_drafts
    assert scheduler.pool.counts().at_rest


def test_a_stop_token_before_a_right_draft_drops_what_is_behind_it() -> None:
    scheduler, rank = make(drafts=True)
    scheduler.submit(1, [1, 2, 3], sampling(40))
    updates = [u for _ in range(60) for u in step(scheduler, rank) or []]
    pair, before = next(
        (u.token_ids, [i for v in updates[:place] for i in v.token_ids])
        for place, u in enumerate(updates)
        if len(u.token_ids) == 2
        and u.token_ids[0] != u.token_ids[1]
        and u.token_ids[0] not in [i for v in updates[:place] for i in v.token_ids]
    )
    scheduler, rank = make(drafts=True)
    scheduler.submit(1, [1, 2, 3], sampling(40, pair[0]))
    assert run_all(scheduler, rank)[1] == [*before, pair[0]]
    assert scheduler.pool.counts().at_rest and not rank.tokens


def test_a_draft_preempts_nobody() -> None:
    scheduler, rank = make(num_pages=2, reserve=1, drafts=True)
    for request_id, first in ((1, 8), (2, 9)):  # whose first drafts are wrong
        scheduler.submit(request_id, [first, 2, 3], sampling(5))
    found = []
    while not found or found[-1] != [(1, False), (2, False)]:
        scheduled = _next(scheduler)
        assert scheduled is not None
        found.append([(s.request_id, s.may_draft) for s in scheduled.batch.steps if s.sample])
        scheduler.postprocess(rank.run(scheduled.batch))
    # A draft in the last place of a page; and none where it would want the other's page.
    assert [steps for steps in found if steps] == [
        [(1, True), (2, True)],
        [(1, False), (2, False)],
    ]


def test_prefill_only_request_ends_without_a_token() -> None:
    scheduler, rank = make()
    scheduler.submit(1, list(range(10)), None)
    updates = [update for _ in range(2) for update in step(scheduler, rank) or []]
    assert updates == [RequestUpdate(request_id=1, prefilled=True)]
    run_all(scheduler, rank)
    assert scheduler.pool.counts().at_rest and not rank.tokens


@pytest.mark.parametrize("drafts", [False, True])
def test_preempted_request_resumes_with_the_tokens_it_would_have_had(drafts: bool) -> None:
    prompts = {1: [1, 2, 3], 2: [4, 5, 6], 3: [7, 8]}
    alone = {}
    for request_id, prompt in prompts.items():
        scheduler, rank = make()
        scheduler.submit(request_id, prompt, sampling(20))
        alone |= run_all(scheduler, rank)
    scheduler, rank = make(num_pages=9, reserve=1, drafts=drafts)
    for request_id, prompt in prompts.items():
        scheduler.submit(request_id, prompt, sampling(20))
    assert run_all(scheduler, rank) == alone
    assert scheduler.pool.counts().at_rest


def test_prompt_scores_are_asked_for_again_only_where_the_prefill_was_cut_short() -> None:
    # The first grows into the last page while the second, which is younger, is still prefilled.
    scheduler, rank = make(num_pages=8, chunk_len=4, reserve=1)
    scheduler.submit(1, [1, 2, 3], sampling(8), PromptScoring(num_top=2))
    scheduler.submit(2, list(range(20, 47)), sampling(1), PromptScoring(num_top=2))
    starts = []
    while (scheduled := _next(scheduler)) is not None:
        starts += [(s.request_id, s.prompt_logprobs) for s in scheduled.batch.starts]
        scheduler.postprocess(rank.run(scheduled.batch))
    assert starts == [(1, 2), (2, 2), (2, 2)]
    scheduler, rank = make(num_pages=4, chunk_len=8, reserve=1)
    scheduler.submit(1, [1, 2, 3], sampling(12), PromptScoring(num_top=2))
    scheduler.submit(2, [4, 5, 6], sampling(12), PromptScoring(num_top=2))
    starts = []
    while (scheduled := _next(scheduler)) is not None:
        starts += [(s.request_id, s.prompt_logprobs) for s in scheduled.batch.starts]
        scheduler.postprocess(rank.run(scheduled.batch))
    assert starts == [(1, 2), (2, 2), (2, None)]


def test_request_that_can_never_fit_is_refused_at_once() -> None:
    scheduler, _ = make(num_pages=4)
    with pytest.raises(InvalidRequest, match="needs 5 KV pages"):
        scheduler.submit(1, [1] * 10, sampling(7))
    scheduler.submit(2, [1] * 10, sampling(6))


def test_waiting_requests_are_admitted_in_order() -> None:
    scheduler, _ = make(num_pages=4, reserve=1)
    scheduler.submit(1, [1] * 11, sampling(1))
    scheduler.submit(2, [1] * 9, sampling(1))
    scheduler.submit(3, [1], sampling(1))
    assert [s.request_id for s in scheduler.admit()] == [1]
    assert [s.request_id for s in scheduler.waiting()] == [2, 3]


def test_abort_during_a_pass_keeps_the_pages_until_the_pass_ends() -> None:
    scheduler, rank = make()
    scheduler.submit(1, [1] * 6, sampling(4))
    scheduled = _next(scheduler)
    assert scheduled is not None
    scheduler.abort(1)
    assert scheduler.pool.counts().quarantined > 0
    assert scheduler.postprocess(rank.run(scheduled.batch)) == []
    assert scheduler.pool.counts().at_rest
    run_all(scheduler, rank)
    assert not rank.tokens


_request = st.tuples(st.integers(1, 20), st.integers(1, 16), st.booleans())


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(_request, min_size=1, max_size=6),
    aborts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=4),
    num_pages=st.integers(9, 20),
    chunk_len=st.integers(1, 12),
    drafts=st.booleans(),
)
def test_any_load_comes_to_rest_with_every_page_free(
    requests: list[tuple[int, int, bool]],
    aborts: list[tuple[int, int]],
    num_pages: int,
    chunk_len: int,
    drafts: bool,
) -> None:
    scheduler, rank = make(num_pages=num_pages, chunk_len=chunk_len, reserve=2, drafts=drafts)
    for request_id, (prompt_len, max_tokens, prefill_only) in enumerate(requests):
        scheduler.submit(
            request_id,
            [request_id + 1] * prompt_len,
            None if prefill_only else sampling(max_tokens),
        )
    aborted = set()
    finished: dict[int, int] = {}
    for turn in range(2_000):
        for when, request_id in aborts:
            if when == turn:
                scheduler.abort(request_id)
                aborted.add(request_id)
        updates = step(scheduler, rank)
        for update in updates or []:
            finished[update.request_id] = finished.get(update.request_id, 0) + len(update.token_ids)
        if updates is None and turn > 30:
            break
    assert scheduler.pool.counts().at_rest and not rank.tokens
    for request_id, (_, max_tokens, prefill_only) in enumerate(requests):
        if request_id not in aborted:
            assert finished[request_id] == (0 if prefill_only else max_tokens)


def test_requeued_request_waits_first_and_gets_other_pages() -> None:
    scheduler, rank = make()
    scheduler.submit(1, [1] * 6, sampling(3))
    scheduler.submit(2, [2] * 6, sampling(3))
    alone = {}
    for request_id in (1, 2):
        lone, lone_rank = make()
        lone.submit(request_id, [request_id] * 6, sampling(3))
        alone[request_id] = run_all(lone, lone_rank)[request_id]
    first = scheduler.admit()[0]
    pages = scheduler.pool.page_indices(first.lease_id or 0)
    scheduler.pool.hold(first.lease_id or 0, Use.REMOTE_WRITE)
    scheduler.requeue(1)
    scheduler.start(2)
    assert [s.request_id for s in scheduler.waiting()] == [1]
    assert scheduler.pool.counts().quarantined == len(pages)
    again = scheduler.admit()[0]
    assert not set(scheduler.pool.page_indices(again.lease_id or 0)) & set(pages)
    scheduler.start(1)
    assert run_all(scheduler, rank) == alone
    scheduler.pool.drop(first.lease_id or 0, Use.REMOTE_WRITE, Proof.FENCED)
    assert scheduler.pool.counts().at_rest
