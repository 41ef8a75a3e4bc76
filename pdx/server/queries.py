"""The endpoints that ask the engine for nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pdx import __version__
from pdx.errors import InvalidRequest
from pdx.metrics.node import Health
from pdx.metrics.serving import CONTENT_TYPE
from pdx.server.answer import Service
from pdx.server.bodies import BodyT, DetokenizeBody, TokenizeBody
from pdx.server.incoming import ClientLeft, deadline_in, read_body
from pdx.server.problems import request_timed_out

__all__ = ["Detokenized", "Health", "ModelCard", "ModelList", "Queries", "Tokenized", "Version"]

#: Nobody reads the answer to a client that has left.
_NOBODY = Response(status_code=499)


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A served model."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "pdx"
    #: Prompt plus output tokens of one request, at most (vLLM's name).
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All served models."""

    object: str = "list"
    data: list[ModelCard]


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """What is running."""

    version: str


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids of a text, in vLLM's shape."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = None


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The text of token ids, in vLLM's shape."""

    prompt: str


class Queries:
    """One object for all of them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        return _json(ModelList(data=[self._card()]))

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/{model}``."""
        self._service.checker.check_model(request.path_params["model"])
        return _json(self._card())

    async def health(self, request: Request) -> Response:
        """``GET /health``: 200 or 503; the body says why."""
        channel = self._service.channel
        status = channel.status
        body = Health(
            status="ok" if status.healthy else "unhealthy",
            detail=status.detail,
            streams=channel.num_streams,
            counts=status.counts,
        )
        return _json(body, 200 if status.healthy else 503)

    async def live(self, request: Request) -> Response:
        """``GET /livez``: the process answers; whatever else is wrong, killing it helps nobody."""
        return PlainTextResponse("ok\n")

    async def ready(self, request: Request) -> Response:
        """``GET /readyz``: 200 where a request would be taken now, else 503 with the reason."""
        channel = self._service.channel
        if not channel.status.healthy:
            return PlainTextResponse(f"{channel.status.detail}\n", 503)
        if channel.num_streams >= channel.config.max_streams:
            reason = f"{channel.num_streams} streams run, and no more are allowed"
            return PlainTextResponse(f"{reason}\n", 503)
        return PlainTextResponse("ok\n")

    async def version(self, request: Request) -> Response:
        """``GET /version``."""
        return _json(Version(version=__version__))

    async def metrics(self, request: Request) -> Response:
        """``GET /metrics``, for Prometheus."""
        return Response(self._service.metrics.scrape(), headers={"content-type": CONTENT_TYPE})

    async def timeline(self, request: Request) -> Response:
        """``GET /pdx/requests/{request_id}``: a finished request's timeline; ``?choice=`` picks one
        of several choices."""
        request_id, choice = request.path_params["request_id"], request.query_params.get("choice")
        if choice is not None and not (choice.isdecimal() and len(choice) < 5):
            raise InvalidRequest(f"choice must be an index, got {choice[:80]!r}", param="choice")
        found = await self._service.timelines.find(request_id, int(choice or 0))
        if found is None:
            raise HTTPException(404, f"no finished request {request_id[:80]} is remembered")
        return _json(found)

    async def transfers(self, request: Request) -> Response:
        """``GET /pdx/transfers``: KV caches on their way, and the last that came."""
        return _json(await self._service.channel.transfers())

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``."""
        return await self._read_and_answer(request, TokenizeBody, self._tokenized)

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``."""
        return await self._read_and_answer(request, DetokenizeBody, self._detokenized)

    async def _tokenized(self, body: TokenizeBody) -> Tokenized:
        checker = self._service.checker
        tokens = await checker.tokenize(body)
        return Tokenized(
            count=len(tokens),
            max_model_len=checker.config.context_len,
            tokens=tokens,
            token_strs=await checker.token_strs(tokens) if body.return_token_strs else None,
        )

    async def _detokenized(self, body: DetokenizeBody) -> Detokenized:
        return Detokenized(prompt=await self._service.checker.detokenize(body.tokens))

    async def _read_and_answer(
        self,
        request: Request,
        kind: type[BodyT],
        answer: Callable[[BodyT], Awaitable[msgspec.Struct]],
    ) -> Response:
        """Within the limits of size and time that hold for every request."""
        config = self._service.channel.config
        deadline_s = deadline_in(config.request_timeout_s)
        try:
            raw = await read_body(request.receive, config, deadline_s)
            async with asyncio.timeout_at(deadline_s):
                return _json(await answer(await self._service.checker.parse(raw, kind)))
        except ClientLeft:
            return _NOBODY
        except TimeoutError:
            raise request_timed_out() from None

    def _card(self) -> ModelCard:
        config = self._service.channel.config
        return ModelCard(
            id=config.model_name, created=self._created, max_model_len=config.context_len
        )


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
