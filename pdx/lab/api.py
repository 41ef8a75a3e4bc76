"""A client's view of an OpenAI-compatible server: addresses, errors, events of a stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from pdx.errors import ConfigError, PdxError

if TYPE_CHECKING:
    import httpx

__all__ = ["ApiError", "api_base", "error_of", "events", "events_async", "headers", "pick_model"]

_DONE = "[DONE]"


class ApiError(PdxError):
    """A server refused, failed, or is no OpenAI-compatible one. ``kind`` is what counts it."""

    def __init__(self, message: str, *, kind: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


def api_base(url: str) -> str:
    """The base URL, with /v1: from a whole one, one without a path, or HOST:PORT.

    Raises:
        ConfigError: it is none.
    """
    from urllib.parse import urlsplit

    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            f"{url!r} is not a URL", hint="write for example http://127.0.0.1:8000/v1"
        )
    return whole.rstrip("/") if parts.path.strip("/") else f"{whole.rstrip('/')}/v1"


def headers(api_key: str | None) -> dict[str, str]:
    """What identifies the client."""
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def pick_model(client: httpx.Client, base: str) -> str:
    """The first model that the server names.

    Raises:
        ApiError: it names none.
    """
    import httpx

    try:
        answer = client.get(f"{base}/models")
    except httpx.HTTPError as error:
        raise ApiError(
            f"no answer from {base}: {error}", kind="connection", hint="check the URL"
        ) from error
    if answer.status_code != 200:
        raise error_of(answer.status_code, answer.content)
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ApiError(
            f"{base}/models names no model", kind="protocol", hint="is this an OpenAI server's URL?"
        ) from error


def error_of(status: int, body: bytes) -> ApiError:
    """The error that an answer carries, in OpenAI's shape or in another."""
    text = body.decode(errors="replace").strip()
    kind = f"http_{status}"
    try:
        error = json.loads(text)["error"]
        text, kind = error["message"], f"{kind}:{error['type']}"
    except (ValueError, LookupError, TypeError):
        text = text[:200] or "no text"
    return ApiError(f"the server answered {status}: {text}", kind=kind)


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events.

    Raises:
        ApiError: an error came in the stream, or it broke off.
    """
    for line in answer.iter_lines():
        if (event := _parse(line)) is _END:
            return
        if event is not None:
            yield event
    raise _broken_off()


async def events_async(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The same, on an event loop."""
    async for line in answer.aiter_lines():
        if (event := _parse(line)) is _END:
            return
        if event is not None:
            yield event
    raise _broken_off()


_END: dict[str, Any] = {}


def _parse(line: str) -> dict[str, Any] | None:
    """The event of a line; ``_END`` at the end, None where the line holds none."""
    if not line.startswith("data:"):
        return None
    data = line.removeprefix("data:").strip()
    if data == _DONE:
        return _END
    try:
        event: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise ApiError(f"an event is not JSON: {data[:100]}", kind="protocol") from error
    if "error" in event:
        problem = event["error"]
        message = problem.get("message", problem) if isinstance(problem, dict) else problem
        raise ApiError(f"the stream failed: {message}", kind="stream")
    return event


def _broken_off() -> ApiError:
    return ApiError("the stream broke off before its end", kind="stream")
