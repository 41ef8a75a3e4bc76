"""The two endpoints that generate. One object per endpoint; everything about a request lives in its
handler's task.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import Protocol

from starlette.types import Receive, Scope, Send

from pdx.errors import PdxError
from pdx.metrics.serving import StreamEnd
from pdx.server.answer import Answer, Service
from pdx.server.bodies import ChatBody, CompletionBody, GenerateBody
from pdx.server.chat_shape import ChatShape
from pdx.server.checks import Job, RequestChecker
from pdx.server.completion_shape import CompletionShape
from pdx.server.incoming import ClientLeft, deadline_in, read_body, while_connected
from pdx.server.problems import request_timed_out
from pdx.server.request_log import RequestRecord, record_of
from pdx.server.shapes import AnswerHead, AnswerShape

__all__ = ["ChatApi", "CompletionApi", "GenerateEndpoint"]


class GenerateEndpoint:
    """An ASGI application: reads and checks a body, submits its streams, answers. When the client
    leaves, at any point, its streams are aborted."""

    def __init__(self, service: Service, api: GenerateApi) -> None:
        self._service = service
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        record = record_of(scope)
        config = self._service.channel.config
        deadline_s = deadline_in(config.request_timeout_s)
        with contextlib.suppress(ClientLeft):
            raw = await read_body(receive, config, deadline_s)
            await while_connected(receive, self._answer(raw, send, record, deadline_s))

    async def _answer(
        self, raw: bytes, send: Send, record: RequestRecord, deadline_s: float | None
    ) -> None:
        answer: Answer | None = None
        end: StreamEnd = "failed"
        try:
            async with asyncio.timeout_at(deadline_s) as limit:
                body, job = await self._api.check(raw)
                shape = self._api.shape(self._head(body, job))
                record.api_id = shape.head.request_id
                answer = Answer(self._service, job, shape, record)
                if body.stream:
                    await answer.send_stream(send, limit)
                else:
                    await answer.send_whole(send)
        except TimeoutError:
            end = "timeout"
            self._service.metrics.failed(end)
            raise request_timed_out() from None
        except PdxError as error:
            self._service.metrics.failed(error.kind)
            raise
        except asyncio.CancelledError:
            end = "left"
            raise
        finally:
            if answer is None:
                record.end = end
            else:
                answer.close(end)

    def _head(self, body: GenerateBody, job: Job) -> AnswerHead:
        options = body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        return AnswerHead(
            request_id=f"{self._api.id_prefix}-{secrets.token_hex(12)}",
            model=self._service.channel.config.model_name,
            created=int(time.time()),
            with_token_ids=bool(body.return_token_ids),
            with_logprobs=job.reading.with_logprobs,
            with_usage=with_usage,
            with_running_usage=with_usage and bool(options and options.continuous_usage_stats),
            with_reasoning=getattr(body, "include_reasoning", None) is not False,
            bytes_of=self._service.checker.tokenizer.bytes_of,
        )


class GenerateApi(Protocol):
    """What is particular to one endpoint."""

    id_prefix: str

    async def check(self, raw: bytes) -> tuple[GenerateBody, Job]:
        """Decode and check a body. Raises InvalidRequest, UnknownModel."""

    def shape(self, head: AnswerHead) -> AnswerShape:
        """The bodies of one request's answer."""


class CompletionApi:
    """``POST /v1/completions``."""

    id_prefix = "cmpl"

    def __init__(self, checker: RequestChecker) -> None:
        self._checker = checker

    async def check(self, raw: bytes) -> tuple[GenerateBody, Job]:
        """See GenerateApi."""
        body = await self._checker.parse(raw, CompletionBody)
        return body, await self._checker.completion(body)

    def shape(self, head: AnswerHead) -> AnswerShape:
        """See GenerateApi."""
        return CompletionShape(head)


class ChatApi:
    """``POST /v1/chat/completions``."""

    id_prefix = "chatcmpl"

    def __init__(self, checker: RequestChecker) -> None:
        self._checker = checker

    async def check(self, raw: bytes) -> tuple[GenerateBody, Job]:
        """See GenerateApi."""
        body = await self._checker.parse(raw, ChatBody)
        return body, await self._checker.chat(body)

    def shape(self, head: AnswerHead) -> AnswerShape:
        """See GenerateApi."""
        return ChatShape(head)
