"""Short prompts are not stuck behind long ones, long ones are not starved, peers are alike."""

from __future__ import annotations

from pdx.kv.pages import PagePool
from pdx.request.batch import StepOutput
from pdx.scheduler.scheduler import PrefillChunk, Scheduler, SchedulerLimits

PAGE, CHUNK = 4, 8


def scheduler(num_pages: int = 4096, max_num_seqs: int = 64) -> Scheduler:
    limits = SchedulerLimits(
        page_size=PAGE, chunk_len=CHUNK, max_num_seqs=max_num_seqs, reserve_output_len=4
    )
    return Scheduler(limits, PagePool(num_pages))


def step(each: Scheduler) -> list[PrefillChunk]:
    """One pass; its chunks in order."""
    for sequence in each.admit():
        each.start(sequence.request_id)
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
