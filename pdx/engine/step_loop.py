"""The step loop: schedule a pass, let the rank run it, take in the result. The same for every role.

One task on the primary's event loop. Whoever changes the scheduler (a submit, an abort, an arrival)
calls :meth:`StepLoop.wake`. What comes between two passes is short as a rule, and then nothing else
comes between; a prompt of 100k tokens makes each part of it take long, and then the others who wait
for the event loop have their turn after each part.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol, Self

from pdx.errors import WorkerError
from pdx.metrics.clock import now_s
from pdx.metrics.trace import TraceWriter
from pdx.request.batch import Batch, StepOutput
from pdx.scheduler.passes import ScheduledPass
from pdx.scheduler.request import RequestUpdate
from pdx.scheduler.scheduler import Scheduler

__all__ = ["Ranks", "Role", "StepLoop"]

#: A slice of the event loop that has taken longer ends at the next part's begin.
_SLICE_S = 0.0003


class Ranks(Protocol):
    """All ranks of a node as one (RankGroup, or a simulation's)."""

    async def run(self, batch: Batch) -> StepOutput:
        """Run one pass on all ranks.

        Raises:
            PdxError: a rank failed or died; the node must stop.
        """

    async def died(self) -> WorkerError:
        """Wait until a rank ends, which none should; returns why."""

    async def stop(self) -> None:
        """End all ranks. Keeps their memory mapped."""


class Role(Protocol):
    """What a node adds to the loop."""

    def admit(self) -> None:
        """Let waiting requests in; called before each pass."""

    def before_pass(self, scheduled: ScheduledPass) -> None:
        """The pass is about to be sent to the ranks."""

    def after_pass(self, updates: list[RequestUpdate]) -> None:
        """The pass has been taken in."""


class _Watchdog:
    """A bound on each of many waits, one after the other: what takes longer ends the block with
    TimeoutError.

    One timer looks after all of them. It is late for most, and then asks for what is left of the
    latest: a timer of its own for each pass, made and cancelled, costs as much as what it guards.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._timeout = asyncio.timeout(None)
        self._deadline_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    @property
    def has_expired(self) -> bool:
        """A wait took too long."""
        return self._timeout.expired()

    def begin(self, start_s: float) -> None:
        """A wait begins now."""
        self._deadline_s = start_s + self._limit_s
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self._deadline_s, self._look)

    def end(self) -> None:
        """It is over."""
        self._deadline_s = None

    def _look(self) -> None:
        self._timer = None
        if self._deadline_s is None:
            return
        if now_s() < self._deadline_s:
            self._timer = asyncio.get_running_loop().call_at(self._deadline_s, self._look)
        else:
            self._timeout.reschedule(now_s())


class StepLoop:
    """See the module's docstring."""

    def __init__(
        self,
        scheduler: Scheduler,
        ranks: Ranks,
        role: Role,
        *,
        watchdog_s: float,
        trace: TraceWriter | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._ranks = ranks
        self._role = role
        self._watchdog_s = watchdog_s
        self._woken = asyncio.Event()
        self._trace = trace
        self._slice_began_s = 0.0
        #: CLOCK_MONOTONIC when the last pass ended, seconds.
        self.last_pass_s = now_s()
        self.num_passes = 0

    def wake(self) -> None:
        """Something may be runnable now."""
        self._woken.set()

    async def run(self) -> None:
        """Run passes for ever.

        Raises:
            PdxError: a rank failed, died or hangs; the node must stop.
        """
        watchdog = _Watchdog(self._watchdog_s)
        try:
            async with watchdog:
                await self._run_passes(watchdog)
        except TimeoutError:
            if not watchdog.has_expired:
                raise
            raise WorkerError(
                f"the ranks did not finish pass {self.num_passes + 1} in {self._watchdog_s:g} s"
            ) from None

    async def _run_passes(self, watchdog: _Watchdog) -> None:
        self._slice_began_s = now_s()
        while True:
            self._woken.clear()  # whatever changes from here on is looked at, or wakes us
            self._scheduler.hash_some()  # the role may admit nobody now
            await self._end_a_long_slice()
            self._role.admit()
            await self._end_a_long_slice()
            scheduled = self._scheduler.schedule()
            if scheduled is None:
                await self._wait_for_news()
                continue
            self._role.before_pass(scheduled)
            await self._end_a_long_slice()
            start_s = now_s()
            watchdog.begin(start_s)
            output = await self._run_ranks(scheduled.batch)
            watchdog.end()
            self.num_passes += 1
            self.last_pass_s = self._slice_began_s = now_s()
            if self._trace is not None:
                steps = scheduled.batch.steps
                num_tokens = sum(step.num_tokens for step in steps)
                self._trace.on_pass(
                    start_s, self.last_pass_s, num_tokens=num_tokens, num_requests=len(steps)
                )
            self._role.after_pass(self._scheduler.postprocess(output))

    async def _wait_for_news(self) -> None:
        """Nothing can run. That may change as soon as more prompts are hashed."""
        await (asyncio.sleep(0) if self._scheduler.is_hashing else self._woken.wait())
        self._slice_began_s = now_s()

    async def _end_a_long_slice(self) -> None:
        """Let others have the event loop, unless we have had it for a moment only."""
        if now_s() - self._slice_began_s > _SLICE_S:
            await asyncio.sleep(0)
            self._slice_began_s = now_s()

    async def _run_ranks(self, batch: Batch) -> StepOutput:
        """Prompts that came meanwhile are hashed while the ranks compute."""
        if not self._scheduler.is_hashing:
            return await self._ranks.run(batch)
        output, _ = await asyncio.gather(self._ranks.run(batch), self._hash_the_rest())
        return output

    async def _hash_the_rest(self) -> None:
        while self._scheduler.is_hashing:
            self._scheduler.hash_some()
            await asyncio.sleep(0)
