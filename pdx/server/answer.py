"""One HTTP request's answer: from the first update of its streams to the last.

Lives in the request's task. Nothing of a 200 is sent before every stream has had its first update:
by then the KV cache is proved complete, and a refusal by the engine can still have its own status.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from starlette.types import Message, Send

from pdx.errors import PdxError
from pdx.metrics.serving import ServingMetrics, StreamEnd
from pdx.metrics.timeline import RequestTimeline
from pdx.request.request import SamplingParams
from pdx.request.stream import AbortReason, StreamUpdate
from pdx.server.channel import EngineChannel, StreamGroup
from pdx.server.checks import Job, Prompt, RequestChecker
from pdx.server.choice import ChoiceReader
from pdx.server.deltas import Delta, joined
from pdx.server.problems import error_bytes, request_timed_out
from pdx.server.request_log import RequestRecord
from pdx.server.shapes import AnswerShape, ChunkUsage, Usage, usage_of
from pdx.server.timelines import RecentTimelines

__all__ = ["Answer", "Service"]

#: What the engine is told of streams that still run when their request ends in this way.
_ABORTED_AS: dict[StreamEnd, AbortReason] = {
    "timeout": AbortReason.TIMEOUT,
    "failed": AbortReason.SIBLING_FAILED,
}
#: Longest wait for a client to take the frame that tells of a failure.
_LAST_WORD_S = 5.0

_SSE_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


#: What an update adds, and the usage that its frame tells.
_Told: TypeAlias = tuple[Delta, ChunkUsage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What all requests share."""

    checker: RequestChecker
    channel: EngineChannel
    timelines: RecentTimelines
    metrics: ServingMetrics

    def record(self, request_id: str, choice_idx: int, timeline: RequestTimeline) -> None:
        """A stream's timeline has come: once for each stream that has one."""
        self.timelines.record(request_id, choice_idx, timeline)
        self.metrics.timeline(timeline)


class _Choice:
    """One stream: its reader, and its times for the metrics."""

    def __init__(self, reader: ChoiceReader, prompt_len: int, arrival_s: float) -> None:
        self.reader = reader
        #: Tokens of the prompt that nobody had to compute.
        self.num_cached = 0
        self.prompt_len = prompt_len
        self._arrival_s = arrival_s
        self._last_token_s: float | None = None
        self._has_source = False
        #: How it ended; None: it runs.
        self.ended: StreamEnd | None = None
        self.ttft_s: float | None = None
        self.prefiller: str | None = None

    def take(self, update: StreamUpdate, metrics: ServingMetrics) -> Delta:
        now = time.monotonic()
        num_before = self.reader.num_tokens
        delta = self.reader.take(update)
        self.num_cached = update.num_cached
        if self._last_token_s is None:
            self.ttft_s, self.prefiller = now - self._arrival_s, update.prefiller
            metrics.first_token(self.ttft_s, self.prompt_len, update.num_cached)
            metrics.tokens(self.reader.num_tokens, None)
        else:
            metrics.tokens(self.reader.num_tokens - num_before, now - self._last_token_s)
        self._last_token_s = now
        if update.timeline is not None:
            self._has_source = True
        elif self.reader.stopped_here:
            self._has_source = True  # the timeline is on its way
        if delta.finish_reason is not None:
            self.end(delta.finish_reason, metrics)
        return delta

    def end(self, end: StreamEnd, metrics: ServingMetrics) -> None:
        """Count the stream's end, once."""
        if self.ended is not None:
            return
        self.ended = end
        metrics.ended(end, time.monotonic() - self._arrival_s)
        if self._last_token_s is not None and not self._has_source:
            metrics.prompt_of_unknown_source(self.prompt_len)


class Answer:
    """Owns the streams of a job; ``close`` must be called at its end, whatever that was."""

    def __init__(
        self, service: Service, job: Job, shape: AnswerShape, record: RequestRecord
    ) -> None:
        self._service = service
        self._job = job
        self._shape = shape
        self._streams = [(prompt, params) for prompt in job.prompts for params in prompt.samplings]
        self._group: StreamGroup = service.channel.submit(
            [(prompt.token_ids, params) for prompt, params in self._streams],
            job.cache_salt,
            record.names,
        )
        self._record = record
        service.timelines.name(shape.head.request_id, record.x_request_id)
        self._choices = [
            _Choice(self._reader(idx, *stream), len(stream[0].token_ids), record.arrival_s)
            for idx, stream in enumerate(self._streams)
        ]

    async def send_whole(self, send: Send) -> None:
        """Send one body, when all is there."""
        deltas: list[list[Delta]] = [[] for _ in self._choices]
        while not self._is_done():
            for delta, _ in await self._deltas():
                deltas[delta.choice_idx].append(delta)
        body = self._shape.whole(list(map(joined, deltas)), self._prompts(), self._usage())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def send_stream(self, send: Send, limit: asyncio.Timeout) -> None:
        """Send server-sent events as tokens come. ``limit`` ends before the first byte goes out,
        and its deadline is kept from here on."""
        deltas: list[_Told] = []
        waiting = set(range(len(self._choices)))
        while waiting:
            deltas += await self._deltas()
            waiting -= {delta.choice_idx for delta, _ in deltas}
        deadline_s = limit.when()
        limit.reschedule(None)
        await send(_SSE_START)
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._send_frames(send, self._shape.opening(self._prompts()), deltas)
                while not self._is_done():
                    await self._send_frames(send, [], await self._deltas())
        except (PdxError, TimeoutError) as error:
            await self._fail_stream(send, error)
            return
        closing = [*self._shape.closing(self._usage()), b"data: [DONE]\n\n"]
        await _send_part(send, b"".join(closing), is_last=True)

    def close(self, end: StreamEnd) -> None:
        """Give up what still runs: abort it, and count it as ended in this way."""
        self._group.close(_ABORTED_AS.get(end, AbortReason.LEFT))
        for choice in self._choices:
            choice.end(end, self._service.metrics)
        self._fill_in_record()

    def _fill_in_record(self) -> None:
        """What is known when the answer ends; of several choices, the first one's end."""
        record, usage = self._record, self._usage()
        record.end = self._choices[0].ended
        record.prompt_tokens = usage.prompt_tokens
        record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        record.output_tokens = usage.completion_tokens
        record.prefiller = self._choices[0].prefiller
        record.ttft_s = self._choices[0].ttft_s

    def _reader(self, idx: int, prompt: Prompt, sampling: SamplingParams) -> ChoiceReader:
        tokenizer = self._service.checker.tokenizer
        return ChoiceReader(idx, prompt, sampling, self._job.reading, tokenizer)

    async def _fail_stream(self, send: Send, error: PdxError | TimeoutError) -> None:
        """It is too late for a status: the client learns it from the last frame."""
        problem = error if isinstance(error, PdxError) else request_timed_out()
        self._service.metrics.failed(problem.kind)
        self.close("failed" if isinstance(error, PdxError) else "timeout")
        # A client that does not read may be what took so long.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                await _send_part(send, b"data: %b\n\n" % error_bytes(problem), is_last=True)

    async def _send_frames(self, send: Send, frames: list[bytes], deltas: list[_Told]) -> None:
        for delta, usage in deltas:
            frame = self._shape.chunk(delta, usage)
            if frame is not None:
                frames.append(frame)
        if frames:
            await _send_part(send, b"".join(frames), is_last=False)

    async def _deltas(self) -> list[_Told]:
        """What the next updates add; none of a choice that has ended already."""
        return [
            self._take(idx, update)
            for idx, update in await self._group.updates()
            if self._choices[idx].reader.finish_reason is None
        ]

    def _take(self, idx: int, update: StreamUpdate) -> _Told:
        request_id = self._shape.head.request_id
        if update.timeline is not None:
            self._service.record(request_id, idx, update.timeline)
        choice = self._choices[idx]
        delta = choice.take(update, self._service.metrics)
        if choice.reader.stopped_here and update.timeline is None:
            self._service.timelines.expect(request_id, idx)
            record = partial(self._service.record, request_id, idx)
            self._group.complete_choice(idx, record)
        return delta, self._shape.head.chunk_usage(
            choice.prompt_len, choice.reader.num_tokens, choice.num_cached
        )

    def _is_done(self) -> bool:
        return all(choice.reader.finish_reason is not None for choice in self._choices)

    def _prompts(self) -> list[Sequence[int]]:
        return [prompt.token_ids for prompt, _ in self._streams]

    def _usage(self) -> Usage:
        """A prompt counts once, however many choices it has."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self._job.prompts)
        # The first choice of a prompt computes the KV cache that the others find.
        cached: dict[int, int] = {}
        for (prompt, _), choice in zip(self._streams, self._choices, strict=True):
            least = cached.get(id(prompt), choice.num_cached)
            cached[id(prompt)] = min(least, choice.num_cached)
        num_output = sum(choice.reader.num_tokens for choice in self._choices)
        return usage_of(num_prompt, num_output, sum(cached.values()))


async def _send_part(send: Send, body: bytes, *, is_last: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
