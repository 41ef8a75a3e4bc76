"""One HTTP request as the log tells of it when it has ended. Lives in the request's task."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from pdx.request.names import RequestNames, clean_name

__all__ = ["RequestRecord", "record_of"]

logger = logging.getLogger(__name__)
_SCOPE_KEY = "pdx.record"


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Filled in by whoever learns of it; None: it never came to that."""

    #: What the client sent, cleaned, or what was made for it.
    x_request_id: str
    #: CLOCK_MONOTONIC seconds.
    arrival_s: float = field(default_factory=time.monotonic)
    #: The answer's id. Only requests that generate have one.
    api_id: str | None = None
    end: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    #: Control address; None: the prompt was prefilled on this node.
    prefiller: str | None = None

    @property
    def names(self) -> RequestNames:
        """Both ids, for the other processes and nodes."""
        return RequestNames(self.api_id or "", self.x_request_id)

    def write(self, method: str, path: str, status: int) -> None:
        """The line of the request, which has ended: at info where it generates, else at debug."""
        level = logging.INFO if path in _GENERATING else logging.DEBUG
        if not logger.isEnabledFor(level):
            return
        fields, path = self._fields(status), clean_name(path)
        told = " ".join(f"{name}={value}" for name, value in fields.items())
        logger.log(
            level,
            "%s %s: %s",
            method,
            path,
            told,
            extra={"fields": {"method": method, "path": path, **fields}},
        )

    def _fields(self, status: int) -> dict[str, Any]:
        fields = {
            "request_id": self.api_id,
            "x_request_id": self.x_request_id,
            "status": status,
            "end": self.end,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "ttft_s": None if self.ttft_s is None else round(self.ttft_s, 6),
            "total_s": round(time.monotonic() - self.arrival_s, 6),
            "prefiller": self.prefiller,
        }
        return {name: value for name, value in fields.items() if value is not None}


_GENERATING = frozenset({"/v1/completions", "/v1/chat/completions"})


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request of this scope, made when it is asked for first."""
    if _SCOPE_KEY not in scope:
        sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        name = clean_name(sent.decode("latin-1")) or secrets.token_hex(16)
        scope[_SCOPE_KEY] = RequestRecord(x_request_id=name)
    record: RequestRecord = scope[_SCOPE_KEY]
    return record
