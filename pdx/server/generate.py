"""The two endpoints that generate. One object per endpoint; everything about a request lives in its
handler's task.

Nothing of a 200 is sent before every stream has had its first update: by then the KV cache is
proved complete, and a refusal by the engine can still have its own status.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from pdx.errors import PdxError
from pdx.request.request import FinishReason
from pdx.request.stream import StreamUpdate
from pdx.server.bodies import ChatBody, CompletionBody, GenerateBody, parse_body
from pdx.server.channel import EngineChannel, StreamGroup
from pdx.server.checks import Prompt, RequestChecker
from pdx.server.problems import error_bytes
from pdx.server.shapes import (
    AnswerHead,
    AnswerShape,
    ChatShape,
    CompletionShape,
    Delta,
    FullChoice,
    Usage,
)
from pdx.server.timelines import RecentTimelines
from pdx.text.detokenizer import Detokenizer

__all__ = ["ChatApi", "CompletionApi", "GenerateEndpoint", "Service"]

MAX_BODY_BYTES = 16 << 20
#: A longer body is read to here and dropped, so that its sender gets to read the answer.
_MAX_DRAINED_BYTES = 4 * MAX_BODY_BYTES

_SSE_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What all requests share."""

    checker: RequestChecker
    channel: EngineChannel
    timelines: RecentTimelines


class _Choice:
    """One stream's output so far."""

    def __init__(self, idx: int, prompt: Prompt, detokenizer: Detokenizer) -> None:
        self.idx = idx
        self.prompt_token_ids = prompt.token_ids
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._stop_token_ids = prompt.sampling.stop_token_ids
        self._detokenizer = detokenizer

    def take(self, update: StreamUpdate) -> Delta:
        visible = update.token_ids
        self.num_tokens += len(visible)
        self.finish_reason = update.finish_reason
        stopped = update.finish_reason is FinishReason.STOP
        if stopped and visible and visible[-1] in self._stop_token_ids:
            visible = visible[:-1]  # it may be an ordinary token with a text
        text = self._detokenizer.push(visible)
        if update.finish_reason is not None:
            text += self._detokenizer.flush()
        return Delta(
            choice_idx=self.idx,
            text=text,
            token_ids=update.token_ids,
            finish_reason=update.finish_reason,
        )


class _Answer:
    """One HTTP request's streams, from the first update to the last."""

    def __init__(
        self, service: Service, group: StreamGroup, shape: AnswerShape, prompts: Sequence[Prompt]
    ) -> None:
        self._service = service
        self._group = group
        self._shape = shape
        new = service.checker.tokenizer.detokenizer
        self._choices = [_Choice(idx, prompt, new()) for idx, prompt in enumerate(prompts)]

    async def send_whole(self, send: Send) -> None:
        deltas: list[list[Delta]] = [[] for _ in self._choices]
        while not self._is_done():
            for delta in await self._deltas():
                deltas[delta.choice_idx].append(delta)
        choices = [
            _join(choice, parts) for choice, parts in zip(self._choices, deltas, strict=True)
        ]
        body = self._shape.whole(choices, self._usage())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def send_stream(self, send: Send) -> None:
        deltas: list[Delta] = []
        waiting = set(range(len(self._choices)))
        while waiting:
            deltas += await self._deltas()
            waiting -= {delta.choice_idx for delta in deltas}
        await send(_SSE_START)
        frames = self._shape.opening([choice.prompt_token_ids for choice in self._choices])
        try:
            await self._send_frames(send, frames, deltas)
            while not self._is_done():
                await self._send_frames(send, [], await self._deltas())
        except PdxError as error:  # too late for a status: the client learns it from the last frame
            await _send_part(send, b"data: %b\n\n" % error_bytes(error), is_last=True)
            return
        closing = [*self._shape.closing(self._usage()), b"data: [DONE]\n\n"]
        await _send_part(send, b"".join(closing), is_last=True)

    async def _send_frames(self, send: Send, frames: list[bytes], deltas: list[Delta]) -> None:
        frames += [frame for delta in deltas if (frame := self._shape.chunk(delta)) is not None]
        if frames:
            await _send_part(send, b"".join(frames), is_last=False)

    async def _deltas(self) -> list[Delta]:
        return [self._take(idx, update) for idx, update in await self._group.updates()]

    def _take(self, idx: int, update: StreamUpdate) -> Delta:
        if update.timeline is not None:
            self._service.timelines.record(self._shape.head.request_id, idx, update.timeline)
        return self._choices[idx].take(update)

    def _is_done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    def _usage(self) -> Usage:
        num_prompt = sum(len(choice.prompt_token_ids) for choice in self._choices)
        num_output = sum(choice.num_tokens for choice in self._choices)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
        )


class _ClientLeft(Exception):
    """The connection ended before the answer did."""


class GenerateEndpoint:
    """An ASGI application: reads and checks a body, submits its streams, answers. When the client
    leaves, at any point, its streams are aborted."""

    def __init__(self, service: Service, api: GenerateApi) -> None:
        self._service = service
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        with contextlib.suppress(_ClientLeft):
            raw = await _read_body(receive)
            await _while_connected(receive, self._answer(raw, send))

    async def _answer(self, raw: bytes, send: Send) -> None:
        body, prompts = await self._api.check(raw)
        wants_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        head = AnswerHead(
            request_id=f"{self._api.id_prefix}-{secrets.token_hex(12)}",
            model=self._service.channel.config.model_name,
            created=int(time.time()),
            with_token_ids=bool(body.return_token_ids),
            with_usage=wants_usage,
        )
        group = self._service.channel.submit(prompts)
        try:
            answer = _Answer(self._service, group, self._api.shape(head), prompts)
            await (answer.send_stream(send) if body.stream else answer.send_whole(send))
        finally:
            group.close()


class GenerateApi(Protocol):
    """What is particular to one endpoint."""

    id_prefix: str

    async def check(self, raw: bytes) -> tuple[GenerateBody, list[Prompt]]:
        """Decode and check a body; one prompt per choice. Raises InvalidRequest, UnknownModel."""

    def shape(self, head: AnswerHead) -> AnswerShape:
        """The bodies of one request's answer."""


class CompletionApi:
    """``POST /v1/completions``."""

    id_prefix = "cmpl"

    def __init__(self, checker: RequestChecker) -> None:
        self._checker = checker

    async def check(self, raw: bytes) -> tuple[GenerateBody, list[Prompt]]:
        """See GenerateApi."""
        body = parse_body(raw, CompletionBody)
        return body, await self._checker.completion(body)

    def shape(self, head: AnswerHead) -> AnswerShape:
        """See GenerateApi."""
        return CompletionShape(head)


class ChatApi:
    """``POST /v1/chat/completions``."""

    id_prefix = "chatcmpl"

    def __init__(self, checker: RequestChecker) -> None:
        self._checker = checker

    async def check(self, raw: bytes) -> tuple[GenerateBody, list[Prompt]]:
        """See GenerateApi."""
        body = parse_body(raw, ChatBody)
        return body, await self._checker.chat(body)

    def shape(self, head: AnswerHead) -> AnswerShape:
        """See GenerateApi."""
        return ChatShape(head)


def _join(choice: _Choice, deltas: Sequence[Delta]) -> FullChoice:
    assert choice.finish_reason is not None
    return FullChoice(
        text="".join(delta.text for delta in deltas),
        prompt_token_ids=choice.prompt_token_ids,
        token_ids=[i for delta in deltas for i in delta.token_ids],
        finish_reason=choice.finish_reason,
    )


async def _send_part(send: Send, body: bytes, *, is_last: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def _read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientLeft
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes <= MAX_BODY_BYTES:
            parts.append(part)
        elif num_bytes > _MAX_DRAINED_BYTES or not message.get("more_body"):
            raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; cancel it when the client leaves.

    Raises:
        _ClientLeft: it left first.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_wait_for_leave(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _ClientLeft
        working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_for_leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
