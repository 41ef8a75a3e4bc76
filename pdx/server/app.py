"""The HTTP application: routes, what happens to every request, and the one place where errors
become bodies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pdx.errors import PdxError
from pdx.server.answer import Service
from pdx.server.generate import ChatApi, CompletionApi, GenerateEndpoint
from pdx.server.middleware import FollowRequests, RequireKey
from pdx.server.openapi import openapi_document
from pdx.server.problems import error_body, error_bytes
from pdx.server.queries import Queries

__all__ = ["build_app"]

#: With a 503: clients that heed it ask again, here or elsewhere.
_RETRY_AFTER_S = "1"


def build_app(service: Service) -> ASGIApp:
    """The application of one frontend."""
    queries = Queries(service)
    completions = GenerateEndpoint(service, CompletionApi(service.checker))
    chat = GenerateEndpoint(service, ChatApi(service.checker))
    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", queries.models),
        Route("/v1/models/{model:path}", queries.model),
        Route("/tokenize", queries.tokenize, methods=["POST"]),
        Route("/detokenize", queries.detokenize, methods=["POST"]),
        Route("/health", queries.health),
        Route("/livez", queries.live),
        Route("/readyz", queries.ready),
        Route("/version", queries.version),
        Route("/metrics", queries.metrics),
        Route("/pdx/requests/{request_id:path}", queries.timeline),
        Route("/pdx/transfers", queries.transfers),
    ]
    document = msgspec.json.encode(openapi_document(service.channel.config))
    routes.append(Route("/openapi.json", _fixed(document)))
    app = Starlette(
        routes=routes,
        middleware=_middleware(service),
        exception_handlers={
            PdxError: _on_pdx_error,
            HTTPException: _on_http_exception,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False  # a path is right or a 404
    # Around all of Starlette: its answer to a bug of ours is followed too.
    paths = frozenset(route.path for route in routes)
    return FollowRequests(app, metrics=service.metrics, routes=paths)


def _fixed(body: bytes) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint whose answer never changes."""

    async def answer(request: Request) -> Response:
        return Response(body, media_type="application/json")

    return answer


def _middleware(service: Service) -> list[Middleware]:
    """Outermost first. A preflight request carries no key, so it is answered before keys are asked
    for."""
    config = service.channel.config
    layers: list[Middleware] = []
    if config.cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            )
        )
    if config.api_key is not None:
        layers.append(Middleware(RequireKey, key=config.api_key))
    return layers


def _on_pdx_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PdxError)
    headers = {"retry-after": _RETRY_AFTER_S} if error.http_status == 503 else None
    return Response(error_bytes(error), error.http_status, headers, media_type="application/json")


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
