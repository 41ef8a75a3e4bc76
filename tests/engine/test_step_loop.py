"""The step loop with a scheduler of its own, on ranks that only count."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pdx.engine import step_loop
from pdx.engine.step_loop import StepLoop
from pdx.errors import WorkerError
from pdx.kv.pages import PagePool
from pdx.lab.sim.loop import VirtualLoop
from pdx.metrics.clock import now_s
from pdx.request.batch import Batch, StepOutput
from pdx.scheduler.passes import ScheduledPass
from pdx.scheduler.request import RequestUpdate
from pdx.scheduler.scheduler import Scheduler, SchedulerLimits

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

    def after_pass(self, updates: list[RequestUpdate]) -> None:
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


@pytest.mark.parametrize("is_slow", [False, True])
async def test_others_have_a_turn_between_the_parts_of_a_step_that_take_long(
    monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    node = Node()
    turns, at = 0, {}
    reads = itertools.count()
    monkeypatch.setattr(step_loop, "now_s", lambda: next(reads) * 0.001 * is_slow)

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            at[name] = turns
            return call(*arguments)

        return noted

    for owner, name in (
        (node.scheduler, "hash_some"),
        (node, "admit"),
        (node, "before_pass"),
        (node, "run"),
    ):
        monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
    node.submit(1, [1, 2, 3])
    running = asyncio.create_task(node.loop.run())
    while "run" not in at:
        await asyncio.sleep(0)
        turns += 1
    running.cancel()
    first = at["hash_some"]
    assert [number - first for number in at.values()] == ([0, 1, 2, 3] if is_slow else [0] * 4)


async def test_what_comes_between_two_parts_of_a_step_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt of less than a page, after the role has looked for prompts: none else wakes us."""
    node = Node()
    reads = itertools.count()
    monkeypatch.setattr(step_loop, "now_s", lambda: next(reads) * 0.001)
    admit, comes = node.admit, iter([1])

    def admit_and_go_on() -> None:
        admit()
        for request_id in comes:
            asyncio.get_running_loop().call_soon(node.submit, request_id, [1] * (PAGE - 1))

    monkeypatch.setattr(node, "admit", admit_and_go_on)
    running = asyncio.create_task(node.loop.run())
    async with asyncio.timeout(5):
        assert await node.prefilled.get() == 1
    running.cancel()


class SlowNode(Node):
    """Its passes take so many seconds."""

    pass_s = 6.0

    async def run(self, batch: Batch) -> StepOutput:
        await asyncio.sleep(self.pass_s)
        return await super().run(batch)


def run_virtually(main: Coroutine[Any, Any, float]) -> float:
    """What it returns, in virtual time."""
    loop = VirtualLoop(lambda process, what: pytest.fail(what))  # type: ignore[abstract]
    task = loop.create_task(main)
    assert loop.run_until(1000 * 10**9, task.done)
    took_s: float = task.result()
    return took_s


def test_every_pass_has_all_of_the_watchdogs_time() -> None:
    async def main() -> float:
        node = SlowNode()
        running = asyncio.create_task(node.loop.run())
        for request_id in range(1, 5):
            node.submit(request_id, [1] * PAGE)
            assert await node.prefilled.get() == request_id
        await asyncio.sleep(60)  # idle time is nobody's
        node.pass_s = 600
        node.submit(5, [1] * PAGE)
        began_s = now_s()
        with pytest.raises(WorkerError, match=r"did not finish pass \d+ in 10 s"):
            await running
        return now_s() - began_s

    assert run_virtually(main()) == pytest.approx(10)


def test_a_step_loop_that_is_cancelled_in_a_pass_leaves_no_watchdog() -> None:
    async def main() -> float:
        node = SlowNode()
        running = asyncio.create_task(node.loop.run())
        node.submit(1, [1] * PAGE)
        await asyncio.sleep(3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.sleep(20)
        return now_s()

    assert run_virtually(main()) == pytest.approx(23)
