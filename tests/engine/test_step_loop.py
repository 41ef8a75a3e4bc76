"""The step loop with a scheduler of its own, on ranks that only count."""

from __future__ import annotations

import asyncio

from pdx.engine.step_loop import StepLoop
from pdx.errors import WorkerError
from pdx.kv.pages import PagePool
from pdx.request.batch import Batch, StepOutput
from pdx.scheduler.scheduler import ScheduledPass, Scheduler, SchedulerLimits
from pdx.scheduler.sequence import SequenceUpdate

PAGE = 4
LONG_PROMPT = list(range(2000 * PAGE))


class Node:
    """A prefiller without links: its own role, and its ranks."""

    def __init__(self) -> None:
        limits = SchedulerLimits(
            page_size=PAGE, chunk_len=1 << 20, max_num_seqs=8, reserve_output_len=4
        )
        self.scheduler = Scheduler(limits, PagePool(4096), "model")
        self.loop = StepLoop(self.scheduler, self, self, watchdog_s=10)
        self.prefilled: asyncio.Queue[int] = asyncio.Queue()
        #: Whether each pass ended with prompts that were not hashed.
        self.was_hashing: list[bool] = []
        self.may_admit = True

    def submit(self, request_id: int, token_ids: list[int]) -> None:
        self.scheduler.submit(request_id, token_ids, None)
        self.loop.wake()

    # As ranks.
    async def run(self, batch: Batch) -> StepOutput:
        for _ in range(20):  # a pass takes a while
            await asyncio.sleep(0)
        self.was_hashing.append(self.scheduler.is_hashing)
        return StepOutput(pass_idx=batch.pass_idx, tokens=[], pass_s=0.0)

    async def died(self) -> WorkerError:
        raise NotImplementedError

    async def stop(self) -> None:
        """There is nothing to stop."""

    # As a role.
    def admit(self) -> None:
        for sequence in self.scheduler.admit() if self.may_admit else []:
            self.scheduler.start(sequence.request_id)

    def before_pass(self, scheduled: ScheduledPass) -> None:
        """Nobody is told."""

    def after_pass(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            self.prefilled.put_nowait(update.request_id)


async def test_a_prompt_that_takes_long_to_hash_runs_without_another_call() -> None:
    node = Node()
    running = asyncio.create_task(node.loop.run())
    node.submit(1, LONG_PROMPT)
    assert await node.prefilled.get() == 1
    running.cancel()


async def test_prompts_are_hashed_while_a_pass_runs() -> None:
    node = Node()
    node.submit(1, [1, 2, 3])
    node.submit(2, LONG_PROMPT)
    running = asyncio.create_task(node.loop.run())
    assert [await node.prefilled.get() for _ in range(2)] == [1, 2]
    assert node.was_hashing == [False, False]
    running.cancel()


async def test_a_role_that_admits_nobody_leaves_the_loop_idle() -> None:
    node = Node()
    node.may_admit = False
    running = asyncio.create_task(node.loop.run())
    node.submit(1, LONG_PROMPT)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not node.scheduler.is_hashing
    node.may_admit = True
    node.loop.wake()
    assert await node.prefilled.get() == 1
    running.cancel()
