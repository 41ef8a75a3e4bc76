"""Sequences that begin alike share pages, by content and position, and only what is final."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Collection

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdx.kv.pages import PagePool, Use
from pdx.kv.prefix import next_key, root_key
from pdx.request.batch import SampledToken, StepOutput
from pdx.request.ids import IdArray
from pdx.request.request import SamplingParams
from pdx.scheduler.passes import ScheduledPass
from pdx.scheduler.prefixes import PrefixSharing
from pdx.scheduler.request import PromptScoring, Request, RequestUpdate
from pdx.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.scheduler.test_scheduler import DictRank

PAGE = 4


class Node:
    """A scheduler that prefills only, and what its pages hold by our own book-keeping."""

    def __init__(self, num_pages: int = 16, chunk_len: int = 8, root: str | None = "model") -> None:
        limits = SchedulerLimits(
            page_size=PAGE, chunk_len=chunk_len, max_num_seqs=8, reserve_output_len=4
        )
        self.scheduler = Scheduler(limits, PagePool(num_pages), root)
        #: The tokens up to its end whose KV each page holds.
        self.content: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.num_computed = 0

    def submit(self, request_id: int, token_ids: list[int], salt: str = "") -> None:
        self.tokens[request_id] = token_ids
        self.scheduler.submit(request_id, token_ids, None, cache_salt=salt)

    def step(self, held: Collection[int] = ()) -> list[RequestUpdate]:
        for request in self.scheduler.admit(held):
            self.scheduler.start(request.request_id)
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return []
        self._compute(scheduled)
        output = StepOutput(pass_idx=scheduled.batch.pass_idx, tokens=[], pass_s=0.0)
        return self.scheduler.postprocess(output)

    def run(self, *request_ids: int) -> None:
        left = set(request_ids)
        while left:
            left -= {update.request_id for update in self.step() if update.prefilled}

    def _compute(self, scheduled: ScheduledPass) -> None:
        for chunk in scheduled.chunks:
            token_ids = self.tokens[chunk.request_id]
            self.num_computed += chunk.end - chunk.start
            for place in range(chunk.start // PAGE):
                assert self.content[chunk.page_indices[place]] == token_ids[: (place + 1) * PAGE]
            for place in range(chunk.start // PAGE, -(-chunk.end // PAGE)):
                page = chunk.page_indices[place]
                self.content[page] = token_ids[: min((place + 1) * PAGE, chunk.end)]


def prompt(*groups: int) -> list[int]:
    """A page of tokens for each group."""
    return [group for group in groups for _ in range(PAGE)]


def test_the_second_of_two_like_prompts_computes_only_what_is_new() -> None:
    node = Node()
    node.submit(1, prompt(1, 2, 3))
    node.run(1)
    node.submit(2, [*prompt(1, 2, 3, 4), 9])
    node.run(2)
    node.submit(3, prompt(1, 2, 7))
    node.run(3)
    assert node.num_computed == 3 * PAGE + (PAGE + 1) + PAGE
    assert node.scheduler.pool.counts().at_rest


@pytest.mark.parametrize("length", [4 * PAGE - 1, 4 * PAGE, 4 * PAGE + 1])
def test_of_a_known_prompt_a_prefiller_computes_one_token_at_least(length: int) -> None:
    node = Node()
    token_ids = list(range(length))
    node.submit(1, token_ids)
    node.run(1)
    node.submit(2, token_ids)
    node.run(2)
    assert node.num_computed - length == (length - 1) % PAGE + 1


def test_like_prompts_that_come_together_are_computed_once() -> None:
    node = Node(chunk_len=PAGE)
    for request_id in (1, 2, 3):
        node.submit(request_id, [*prompt(1, 2, 3), request_id])
    node.run(1, 2, 3)
    assert node.num_computed == 3 * PAGE + 3


def test_one_that_waited_for_an_aborted_one_goes_on_without_it() -> None:
    node = Node(chunk_len=PAGE)
    node.submit(1, prompt(1, 2, 3))
    node.submit(2, prompt(1, 2, 3))
    node.step()
    node.scheduler.abort(1)
    node.run(2)
    assert node.num_computed == 3 * PAGE, "the page that was done is used"
    assert node.scheduler.pool.counts().at_rest


def page_key(group: str) -> bytes:
    """The key of a prompt's first page in a pool of these layers."""
    sharing = PrefixSharing(PagePool(4, group), PAGE, "model")
    request = Request(1, IdArray([1] * PAGE * 2), PAGE * 2, None)
    sharing.hash_later(request)
    sharing.go_on()
    return request.page_keys[0]


def test_another_salt_or_another_model_or_group_of_layers_shares_nothing() -> None:
    node = Node()
    for request_id, salt in ((1, ""), (2, "a"), (3, "b"), (4, "a")):
        node.submit(request_id, prompt(1, 2), salt)
        node.run(request_id)
    assert node.num_computed == 3 * 2 * PAGE + PAGE
    assert root_key("model a", "") != root_key("model b", "")
    assert page_key("full_attention") != page_key("sliding_attention")
    assert root_key("ab", "c") != root_key("a", "bc")


def test_without_a_root_nothing_is_kept() -> None:
    node = Node(root=None)
    for request_id in (1, 2):
        node.submit(request_id, prompt(1, 2))
        node.run(request_id)
    assert node.num_computed == 2 * 2 * PAGE
    assert node.scheduler.pool.counts().free == node.scheduler.pool.num_pages


def test_a_prompt_that_is_scored_is_computed_whole() -> None:
    node = Node()
    node.submit(1, prompt(1, 2))
    node.run(1)
    node.tokens[2] = prompt(1, 2)
    node.scheduler.submit(2, prompt(1, 2), None, PromptScoring(num_top=0))
    node.run(2)
    assert node.num_computed == 4 * PAGE


def test_the_least_recently_used_page_gives_way_and_the_end_of_a_prefix_first() -> None:
    node = Node(num_pages=6)
    node.submit(1, [*prompt(1, 2), 0])
    node.run(1)
    node.submit(2, [*prompt(3), 0])
    node.run(2)
    node.submit(3, [*prompt(1, 2), 0])  # used again
    node.run(3)
    node.submit(4, prompt(5, 6, 7, 8))  # needs all but two
    node.run(4)
    before = node.num_computed
    node.submit(5, [*prompt(1), 0])
    node.run(5)
    assert node.num_computed == before + 1, "page 3 gave way, then the second of the pair"


def test_pages_under_send_are_not_given_away() -> None:
    """A prefiller must not reuse a page that its writes still read."""
    node = Node(num_pages=4)
    node.submit(1, prompt(1, 2, 3))
    for request in node.scheduler.admit():
        node.scheduler.start(request.request_id)
    lease_id = node.scheduler.request(1).lease_id  # type: ignore[union-attr]
    assert lease_id is not None
    node.scheduler.pool.hold(lease_id, Use.SEND)
    node.run(1)
    node.submit(2, prompt(4, 5))
    assert node.step() == [], "it waits: only one page is free"
    node.scheduler.pool.drop(lease_id, Use.SEND)
    node.run(2)
    assert node.scheduler.pool.counts().at_rest


def test_a_shared_page_is_cached_only_after_its_last_reader() -> None:
    node = Node()
    node.submit(1, [*prompt(1, 2), 0])
    node.run(1)
    assert node.scheduler.pool.counts().cached == 2
    for request_id in (2, 3):
        node.submit(request_id, [*prompt(1, 2), request_id])
    for request in node.scheduler.admit():
        node.scheduler.start(request.request_id)
    assert node.scheduler.pool.counts().filled == 2
    node.scheduler.abort(2)
    assert node.scheduler.pool.counts().filled == 2
    node.scheduler.abort(3)
    counts = node.scheduler.pool.counts()
    assert (counts.cached, counts.at_rest) == (2, True)


def test_a_decoded_text_is_shared_by_the_next_turn() -> None:
    limits = SchedulerLimits(page_size=PAGE, chunk_len=8, max_num_seqs=8, reserve_output_len=4)
    scheduler = Scheduler(limits, PagePool(16), "model")
    rank = DictRank(PAGE, 16)
    scheduler.submit(1, [1] * 6, SamplingParams(max_tokens=5, temperature=0.0))
    for request in scheduler.admit():
        scheduler.start(request.request_id)
    text = [1] * 6
    while (scheduled := scheduler.schedule()) is not None:
        for update in scheduler.postprocess(rank.run(scheduled.batch)):
            text += update.token_ids
    assert len(text) == 11
    scheduler.submit(2, [*text, 7, 7], SamplingParams(max_tokens=5, temperature=0.0))
    [again] = scheduler.admit()
    assert again.num_cached == 8, "the KV of the last token was never computed"


@settings(max_examples=50)
@given(
    groups=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=12),
    tails=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    chunk_len=st.sampled_from([1, 3, 4, 8]),
)
def test_a_shared_page_always_holds_the_tokens_of_whoever_shares_it(
    groups: list[list[int]], tails: list[int], chunk_len: int
) -> None:
    node = Node(num_pages=8, chunk_len=chunk_len)
    for request_id, (each, tail) in enumerate(zip(groups, tails, strict=False), 1):
        node.submit(request_id, [*prompt(*each), *[9] * tail])
    node.run(*range(1, len(groups) + 1))
    assert node.scheduler.pool.counts().at_rest


def test_a_long_prompt_is_hashed_in_slices_and_admitted_after_the_last() -> None:
    scheduler = Node(num_pages=4096, root="model").scheduler
    token_ids = list(range(2000 * PAGE))
    scheduler.submit(1, token_ids, None)
    scheduler.submit(2, [5] * PAGE, None)
    [long, _] = scheduler.waiting()
    hashed = [0]
    while not (admitted := scheduler.admit()):
        assert scheduler.is_hashing
        hashed.append(len(long.page_keys))
    assert len(hashed) > 4
    assert max(after - before for before, after in itertools.pairwise(hashed)) < 500
    assert {request.request_id for request in admitted} == {1, 2}


def arrived(num_pages: int, max_tokens: int) -> tuple[Scheduler, list[int]]:
    """A decoder's prompt of so many pages, whose KV cache has just come all at once."""
    limits = SchedulerLimits(page_size=PAGE, chunk_len=8, max_num_seqs=8, reserve_output_len=4)
    scheduler = Scheduler(limits, PagePool(2 * num_pages), "model")
    token_ids = list(range(num_pages * PAGE + 1))
    scheduler.submit(1, token_ids, SamplingParams(max_tokens=max_tokens, temperature=0.0))
    while not scheduler.admit():
        pass
    scheduler.start(1, num_computed=num_pages * PAGE)
    return scheduler, token_ids


def test_the_pages_of_a_long_prompt_that_came_at_once_are_published_in_slices() -> None:
    num_pages = 10_000
    scheduler, _ = arrived(num_pages, max_tokens=9)
    request = scheduler.request(1)
    assert request is not None
    published = [0, request.num_published]
    while published[-1] < num_pages:
        scheduled = scheduler.schedule()
        assert scheduled is not None
        token = SampledToken(request_id=1, token_id=5, logprob=0.0)
        scheduler.postprocess(
            StepOutput(pass_idx=scheduled.batch.pass_idx, tokens=[token], pass_s=0.0)
        )
        published.append(request.num_published)
    assert max(after - before for before, after in itertools.pairwise(published)) <= 2048


def test_a_long_prompt_that_ends_early_is_published_whole() -> None:
    num_pages = 10_000
    scheduler, token_ids = arrived(num_pages, max_tokens=9)
    scheduler.abort(1)
    while scheduler.is_hashing:
        assert not scheduler.pool.counts().at_rest, "its lease lives until the last is published"
        scheduler.hash_some()
    counts = scheduler.pool.counts()
    assert counts.at_rest and counts.cached == num_pages
    scheduler.submit(2, [*token_ids, 7], SamplingParams(max_tokens=1, temperature=0.0))
    while not (admitted := scheduler.admit()):
        pass
    assert admitted[0].num_cached == num_pages * PAGE


def test_many_pages_leave_the_cache_in_slices_and_those_to_be_shared_stay() -> None:
    """The shared ones are the oldest, which would have to go first."""
    num_pages, num_shared = 10_000, 3000
    limits = SchedulerLimits(page_size=PAGE, chunk_len=8, max_num_seqs=8, reserve_output_len=4)
    scheduler = Scheduler(limits, PagePool(num_pages), "model")
    first = list(range(num_shared * PAGE))
    second = list(range(10**6, 10**6 + (num_pages - num_shared) * PAGE))
    for request_id, token_ids in enumerate([first, second], 1):
        scheduler.submit(request_id, token_ids, None)
        while not scheduler.admit():
            pass
        scheduler.start(request_id, num_computed=len(token_ids))
        scheduler.abort(request_id)
        while scheduler.is_hashing:
            scheduler.hash_some()
    assert scheduler.pool.counts().cached == num_pages
    scheduler.submit(3, [*first, *range(2 * 10**6, 2 * 10**6 + 6000 * PAGE)], None)
    cached = [num_pages]
    while not (admitted := scheduler.admit()):
        assert scheduler.is_hashing, "the step loop must not wait for anybody else"
        scheduler.hash_some()
        cached.append(scheduler.pool.counts().cached)
    cached.append(scheduler.pool.counts().cached + num_shared)
    assert admitted[0].num_cached == num_shared * PAGE
    assert max(before - after for before, after in itertools.pairwise(cached)) <= 2048
    assert cached[-1] == num_pages - 6000, "no more than it needs"


@pytest.mark.parametrize(
    ("others", "num_left"),
    [([(5, 6, 7, 8)], 0), ([(5, 6, 7, 8), (1, 2, 3)], 3), ([(1, 2, 9, 9)], 2)],
)
def test_pages_that_were_found_and_have_left_the_cache_meanwhile_are_not_shared(
    others: list[tuple[int, ...]], num_left: int
) -> None:
    """A prompt whose pages were looked up waits; others run and take their places."""
    node = Node(num_pages=4)
    node.submit(1, prompt(1, 2, 3))
    node.run(1)
    node.submit(2, [*prompt(1, 2, 3), 4])
    assert node.scheduler.admit(held={2}) == []
    [waiting] = node.scheduler.waiting()
    assert len(waiting.found_pages) == 3
    for request_id, groups in enumerate(others, 3):
        node.submit(request_id, prompt(*groups))
        while node.scheduler.num_waiting > 1 or node.scheduler.num_active:
            node.step(held={2})
    before = node.num_computed
    node.run(2)  # the node compares what each page holds
    assert node.num_computed - before == (3 - num_left) * PAGE + 1


def test_a_prompt_that_leaves_is_hashed_no_further() -> None:
    scheduler = Node(num_pages=4096, root="model").scheduler
    scheduler.submit(1, list(range(2000 * PAGE)), None)
    [request] = scheduler.waiting()
    scheduler.hash_some()
    num_hashed = len(request.page_keys)
    scheduler.abort(1)
    scheduler.hash_some()
    assert not scheduler.is_hashing
    assert len(request.page_keys) == num_hashed


def test_a_prompt_that_leaves_before_it_is_hashed_keeps_nobody_busy() -> None:
    """Found by the simulator: the step loop turned for ever, in want of something to hash."""
    scheduler = Node(num_pages=4096, root="model").scheduler
    scheduler.submit(1, list(range(3 * PAGE)), None)
    scheduler.abort(1)
    assert scheduler.admit() == []
    assert not scheduler.is_hashing


def test_keys_are_equal_in_all_processes() -> None:
    """The seed of Python's own hashing must not matter."""
    program = (
        "from pdx.kv.prefix import next_key, root_key;"
        "print(next_key(root_key('model', 'salt'), [1, 70000, 3]).hex())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert said == {next_key(root_key("model", "salt"), [1, 70000, 3]).hex()}


def decoded(scheduler: Scheduler, rank: DictRank, request_id: int, token_ids: list[int]) -> int:
    """Serve a prompt as a decoder does; how many of its tokens a prefiller is asked for."""
    scheduler.submit(request_id, token_ids, SamplingParams(max_tokens=1, temperature=0.0))
    [request] = scheduler.admit()
    wanted = len(token_ids) - 1 - request.num_cached
    if scheduler.lacks_one_page_at_most(request):
        wanted = 0
    scheduler.start(request_id, num_computed=len(token_ids) - 1 if wanted else None)
    while (scheduled := scheduler.schedule()) is not None:
        scheduler.postprocess(rank.run(scheduled.batch))
    return wanted


@settings(max_examples=200)
@given(page=st.integers(1, 5), num_pages=st.integers(0, 4), rest=st.integers(0, 4))
def test_a_repeated_prompt_asks_for_nothing_that_is_here_and_computes_a_page_at_most(
    page: int, num_pages: int, rest: int
) -> None:
    """All lengths about the pages' ends. A prompt that never filled a page is not kept."""
    token_ids = list(range(max(1, num_pages * page + rest % page)))
    limits = SchedulerLimits(page_size=page, chunk_len=8, max_num_seqs=8, reserve_output_len=1)
    decoder = Scheduler(limits, PagePool(32), "model")
    rank = DictRank(page, 32)
    first = decoded(decoder, rank, 1, token_ids)
    assert first == len(token_ids) - 1
    again = decoded(decoder, rank, 2, token_ids)
    assert again == (0 if len(token_ids) >= page else len(token_ids) - 1)
    other = decoded(decoder, rank, 3, [99, *token_ids[1:]])
    assert other == first, "another prompt of this length is not here"

    if not token_ids[:-1]:
        return
    prefiller = Scheduler(limits, PagePool(32), "model")
    computed = []
    for request_id in (1, 2):
        prefiller.submit(request_id, token_ids[:-1], None)
        [request] = prefiller.admit()
        prefiller.start(request_id)
        computed.append(request.prefill_len - request.num_cached)
        while (scheduled := prefiller.schedule()) is not None:
            output = StepOutput(pass_idx=scheduled.batch.pass_idx, tokens=[], pass_s=0.0)
            prefiller.postprocess(output)
    num_prefilled = len(token_ids) - 1
    assert computed == [num_prefilled, (num_prefilled - 1) % page + 1]
