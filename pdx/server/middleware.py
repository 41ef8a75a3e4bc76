"""What happens to every HTTP request, whatever its path: its id, its count and line, the key."""

from __future__ import annotations

import hmac

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdx.metrics.serving import ServingMetrics
from pdx.server.problems import error_body
from pdx.server.request_log import record_of

__all__ = ["FollowRequests", "RequireKey"]

_CLIENT_LEFT = 499
_OPEN_PATHS = frozenset({"/health", "/livez", "/readyz"})


class FollowRequests:
    """Gives every answer its X-Request-Id, counts the request by route and status, and writes its
    line to the log.

    The id is the client's, or made here. ``routes`` are the known ones: a counter must not have a
    label for every path that somebody tries.
    """

    def __init__(self, app: ASGIApp, metrics: ServingMetrics, routes: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        header = (b"x-request-id", record.x_request_id.encode())
        status = _CLIENT_LEFT

        async def send_labelled(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, send_labelled)
        finally:
            self._metrics.http(self._route(scope["path"]), status)
            record.write(scope["method"], scope["path"], status)

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
