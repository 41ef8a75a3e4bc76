"""The HTTP application: routes, and the one place where errors become bodies."""

from __future__ import annotations

import time
from http import HTTPStatus

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdx.errors import InvalidRequest, PdxError
from pdx.server.generate import ChatApi, CompletionApi, GenerateEndpoint, Service
from pdx.server.problems import error_body, error_bytes

__all__ = ["build_app"]


def build_app(service: Service) -> ASGIApp:
    """The application of one frontend."""
    queries = _Queries(service)
    completions = GenerateEndpoint(service, CompletionApi(service.checker))
    chat = GenerateEndpoint(service, ChatApi(service.checker))
    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", queries.models),
            Route("/v1/models/{model:path}", queries.model),
            Route("/health", queries.health),
            Route("/pdx/requests/{request_id}", queries.timeline),
        ],
        middleware=[Middleware(_EchoRequestId)],
        exception_handlers={
            PdxError: _on_pdx_error,
            HTTPException: _on_http_exception,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False  # a path is right or a 404
    return app


class _Queries:
    """The endpoints that answer at once."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._service.checker.check_model(request.path_params["model"])
        return _json(self._card())

    async def health(self, request: Request) -> Response:
        """200 or 503, for load balancers; the body says why."""
        channel = self._service.channel
        status = channel.status
        body = {
            "status": "ok" if status.healthy else "unhealthy",
            "detail": status.detail,
            "streams": channel.num_streams,
            "counts": status.counts,
        }
        return _json(body, 200 if status.healthy else 503)

    async def timeline(self, request: Request) -> Response:
        """The timeline of a finished request; ``?choice=`` picks one of several choices."""
        request_id, choice = request.path_params["request_id"], request.query_params.get("choice")
        if choice is not None and not choice.isdecimal():
            raise InvalidRequest(f"choice must be an index, got {choice!r}", param="choice")
        found = self._service.timelines.find(request_id, int(choice or 0))
        if found is None:
            raise HTTPException(404, f"no finished request {request_id} is remembered")
        return _json(found)

    def _card(self) -> dict[str, object]:
        config = self._service.channel.config
        return {
            "id": config.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "pdx",
            "max_model_len": config.context_len,
        }


class _EchoRequestId:
    """Puts a client's X-Request-Id on the answer. It is a label of the client's; nothing here uses
    it as a key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope.get("headers", ())
        labels = [(name, value) for name, value in headers if name == b"x-request-id"][:1]

        async def send_labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *labels]}
            await send(message)

        await self._app(scope, receive, send_labelled if labels else send)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _on_pdx_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PdxError)
    return Response(error_bytes(error), error.http_status, media_type="application/json")


def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    detail = error.detail
    if detail == HTTPStatus(error.status_code).phrase:
        detail = f"{request.method} {request.url.path}: {detail.lower()}"
    return Response(
        error_body(detail, kind), error.status_code, error.headers, media_type="application/json"
    )


def _on_bug(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this answer, and the server logs it."""
    body = error_body("internal error", "internal_error")
    return Response(body, 500, media_type="application/json")
