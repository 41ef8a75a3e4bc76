"""What happens to every HTTP request, whatever its path: labels, counting, the key."""

from __future__ import annotations

import hmac

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdx.metrics.serving import ServingMetrics
from pdx.server.problems import error_body

__all__ = ["CountRequests", "EchoRequestId", "RequireKey"]

_CLIENT_LEFT = 499
_OPEN_PATHS = frozenset({"/health"})


class EchoRequestId:
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


class CountRequests:
    """Counts requests by route and status. ``routes`` are the known ones: a counter must not have a
    label for every path that somebody tries."""

    def __init__(self, app: ASGIApp, metrics: ServingMetrics, routes: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = _CLIENT_LEFT

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        finally:
            self._metrics.http(self._route(scope["path"]), status)

    def _route(self, path: str) -> str:
        if path in self._routes:
            return path
        with_names = (route for route in self._routes if "{" in route)
        return next((r for r in with_names if path.startswith(r.partition("{")[0])), "other")


class RequireKey:
    """Refuses requests without the key as their bearer token or ``x-api-key``, as Anthropic's and
    Azure's clients send it. Health checks need none."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = {b"authorization": b"Bearer " + key.encode(), b"x-api-key": key.encode()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(reversed(scope["headers"]))  # of several with one name the first counts
        # Compared in constant time: the time of a refusal must not tell how much of a key is right.
        is_right = False
        for name, expected in self._expected.items():
            is_right |= hmac.compare_digest(given.get(name, b""), expected)
        if is_right or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        message = "send the server's API key as `Authorization: Bearer KEY` or `x-api-key: KEY`"
        body = error_body(message, "invalid_request_error", code="invalid_api_key")
        headers = {"www-authenticate": "Bearer"}
        refusal = Response(body, 401, headers=headers, media_type="application/json")
        await refusal(scope, receive, send)
