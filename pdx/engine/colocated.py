"""Prefill and decode in one node, without fabric or peer: `pdx generate`, and the oracle of
everything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from pdx.engine.loading import LoadedModel
from pdx.engine.step_loop import StepLoop
from pdx.errors import InvalidRequest, PdxError
from pdx.request.request import SamplingParams
from pdx.scheduler.passes import ScheduledPass
from pdx.scheduler.sequence import PromptScoring, SequenceUpdate

__all__ = ["ColocatedEngine"]


class ColocatedEngine:
    """Generates from prompts. Owns a scheduler; the loaded model stays the caller's."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._context_len = loaded.context_len
        self.scheduler = loaded.scheduler()
        self._loop = StepLoop(
            self.scheduler, loaded.ranks, self, watchdog_s=loaded.config.watchdog_s
        )
        self._streams: dict[int, asyncio.Queue[SequenceUpdate | BaseException]] = {}
        self._next_id = 1
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ColocatedEngine:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def generate(
        self, token_ids: list[int], sampling: SamplingParams
    ) -> AsyncIterator[SequenceUpdate]:
        """Updates of one request, the last one with its finish reason.

        Raises:
            InvalidRequest: the prompt is empty or too long.
            PdxError: the rank failed.
        """
        if not token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if len(token_ids) + sampling.max_tokens > self._context_len:
            raise InvalidRequest(
                f"{len(token_ids)} prompt tokens and {sampling.max_tokens} output tokens exceed "
                f"the context of {self._context_len}",
                param="max_tokens",
            )
        request_id, self._next_id = self._next_id, self._next_id + 1
        stream = self._streams[request_id] = asyncio.Queue()
        num_top = sampling.prompt_logprobs
        scoring = None if num_top is None else PromptScoring(num_top=num_top)
        self.scheduler.submit(request_id, token_ids, sampling, scoring)
        self._loop.wake()
        try:
            while True:
                update = await stream.get()
                if isinstance(update, BaseException):
                    raise update
                yield update
                if update.finish_reason is not None:
                    return
        finally:
            del self._streams[request_id]
            self.scheduler.abort(request_id)
            self._loop.wake()

    async def _run(self) -> None:
        try:
            await self._loop.run()
        except PdxError as error:
            for stream in self._streams.values():
                stream.put_nowait(error)

    def admit(self) -> None:
        for sequence in self.scheduler.admit():
            self.scheduler.start(sequence.request_id)

    def before_pass(self, scheduled: ScheduledPass) -> None:
        """Nothing to tell anybody."""

    def after_pass(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            if update.request_id in self._streams:
                self._streams[update.request_id].put_nowait(update)
