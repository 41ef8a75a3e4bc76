"""Errors in OpenAI's shape, and those that only HTTP knows. Pure."""

from __future__ import annotations

import msgspec

from pdx.errors import PdxError, RequestError, UnknownModel

__all__ = ["ErrorBody", "error_body", "error_bytes", "request_timed_out"]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, for a person; ``param`` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is an error."""

    error: Problem


def error_body(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> bytes:
    """``{"error": {"message", "type", "param", "code"}}``."""
    problem = Problem(message=message, type=kind, param=param, code=code)
    return msgspec.json.encode(ErrorBody(problem))


def error_bytes(error: PdxError) -> bytes:
    """The body of one of our own errors."""
    param = error.param if isinstance(error, RequestError) else None
    code = "model_not_found" if isinstance(error, UnknownModel) else None
    return error_body(error.message, error.kind, param=param, code=code)


def request_timed_out() -> RequestError:
    """The server's own limit on one request's time was reached."""
    error = RequestError("the request took longer than this server allows")
    error.http_status = 504
    error.kind = "timeout"
    return error
