"""Short prompts are not stuck behind long ones, long ones are not starved, peers are alike."""

from __future__ import annotations

import pytest

from pdx.kv.pages import PagePool
from pdx.request.batch import StepOutput
from pdx.request.chunk import PrefillChunk
from pdx.request.ids import IdArray
from pdx.scheduler.order import fill_chunk
from pdx.scheduler.request import Request
from pdx.scheduler.scheduler import Scheduler, SchedulerLimits

PAGE, CHUNK = 4, 8


def scheduler(num_pages: int = 4096, max_num_seqs: int = 64, chunk_len: int = CHUNK) -> Scheduler:
    limits = SchedulerLimits(
        page_size=PAGE, chunk_len=chunk_len, max_num_seqs=max_num_seqs, reserve_output_len=4
    )
    return Scheduler(limits, PagePool(num_pages))


def step(each: Scheduler) -> list[PrefillChunk]:
    """One pass; its chunks in order."""
    for request in each.admit():
        each.start(request.request_id)
    scheduled = each.schedule()
    assert scheduled is not None
    each.postprocess(StepOutput(pass_idx=scheduled.batch.pass_idx, tokens=[], pass_s=0.0))
    return scheduled.chunks


def test_a_short_prompt_beside_long_ones_waits_for_one_pass() -> None:
    node = scheduler()
    for request_id in range(1, 11):
        node.submit(request_id, [1] * 400, None)
    step(node)
    node.submit(11, [1] * 5, None)
    [first, *_] = step(node)
    assert (first.request_id, first.last) == (11, True)


def test_a_long_prompt_ends_although_short_ones_keep_coming() -> None:
    node = scheduler()
    node.submit(1, [1] * 10 * CHUNK, None)
    request_id, passes, ended = 2, 0, False
    while not ended:
        for _ in range(2):
            node.submit(request_id, [1] * CHUNK, None)
            request_id += 1
        ended = any(chunk.request_id == 1 and chunk.last for chunk in step(node))
        passes += 1
        assert passes < 500, "the long prompt starves"


def pass_s(num_tokens: int) -> float:
    """A pass takes as long as its tokens, and a little for itself."""
    return 0.01 + 0.001 * num_tokens


def seconds_to_first_token(
    prompt_len: int, num_others: int, chunk_len: int, came_s: float
) -> float:
    """Until a prompt is computed that comes so long after others of 4,000 tokens."""
    node, now = scheduler(num_pages=20_000, chunk_len=chunk_len), 0.0
    for request_id in range(1, num_others + 1):
        node.submit(request_id, [1] * 4000, None)
    ended = False
    while not ended:
        if now >= came_s and node.request(99) is None:
            node.submit(99, [1] * prompt_len, None)
        chunks = step(node)
        now += pass_s(sum(chunk.end - chunk.start for chunk in chunks))
        ended = any(chunk.request_id == 99 and chunk.last for chunk in chunks)
    return now - came_s


@pytest.mark.parametrize("chunk_len", [64, 512, 2048, 8192])
@pytest.mark.parametrize("came_s", [0.0, 0.001, 0.4, 3.9, 20.0])
def test_a_short_prompt_beside_ten_long_ones_waits_for_twice_its_own_time_and_a_chunk(
    chunk_len: int, came_s: float
) -> None:
    alone = seconds_to_first_token(20, 0, chunk_len, 0.0)
    beside = seconds_to_first_token(20, 10, chunk_len, came_s)
    assert beside <= 2 * alone + pass_s(chunk_len)


def test_long_prompts_fill_up_no_more_than_double_what_short_ones_need() -> None:
    node = scheduler(chunk_len=64)
    node.submit(1, [1] * 400, None)
    node.submit(2, [1] * 500, None)
    step(node)
    node.submit(3, [1] * 10, None)
    node.submit(4, [1] * 12, None)
    taken = {chunk.request_id: chunk.end - chunk.start for chunk in step(node)}
    assert taken == {3: 10, 4: 12, 1: 22}
    assert [(chunk.request_id, chunk.end - chunk.start) for chunk in step(node)] == [(1, 64)]


def test_short_prompts_that_keep_coming_give_every_few_passes_to_a_long_one() -> None:
    node, turns = scheduler(chunk_len=64), []
    node.submit(1, [1] * 40 * 64, None)
    for request_id in range(2, 200):
        node.submit(request_id, [1] * 64, None)
        [chunk, *_] = step(node)
        turns.append(chunk.request_id == 1)
    first = turns.index(True)
    assert first < 40
    share = sum(turns[first:]) / len(turns[first:])
    assert 0.1 < share < 0.3


def test_prompts_of_a_length_are_computed_one_after_the_other() -> None:
    node = scheduler()
    for request_id in (1, 2):
        node.submit(request_id, [1] * 3 * CHUNK, None)
    order = [chunk.request_id for _ in range(6) for chunk in step(node)]
    assert order == [1, 1, 1, 2, 2, 2]


def test_a_peer_that_asks_much_does_not_hold_up_another() -> None:
    node = scheduler(max_num_seqs=2)
    for request_id in range(1, 21):
        node.submit(request_id, [1] * CHUNK, None, group=1)
    step(node)
    node.submit(21, [1] * CHUNK, None, group=2)
    node.submit(22, [1] * CHUNK, None, group=2)
    order = [chunk.request_id for _ in range(8) for chunk in step(node)]
    assert order.index(21) < 2
    assert order.index(22) < 5
    assert [i for i in order if i < 21] == sorted(i for i in order if i < 21)


def test_choosing_the_next_chunk_changes_no_request() -> None:
    def prompts() -> list[Request]:
        return [Request(i, IdArray([1] * n), n, None) for i, n in enumerate((400, 5, 90, 5))]

    before, chosen_from = prompts(), prompts()
    filled = fill_chunk(chosen_from, CHUNK)
    assert chosen_from == before
    assert [(request.request_id, n) for request, n in filled.chosen] == [(1, 5), (3, 3)]
    assert [(request.request_id, n) for request, n in filled.passed_over] == [
        (1, 0),
        (2, 1),
        (0, 1),
    ]
    assert fill_chunk([], CHUNK) == ([], [])
