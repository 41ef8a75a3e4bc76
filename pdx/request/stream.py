"""Messages between the frontend (HTTP, text) and the primary (scheduler, messenger): one stream per
choice.

One UNIX stream socketpair. The primary sends :class:`FrontendConfig`; the frontend binds its HTTP
port and answers :class:`FrontendReady` or :class:`FrontendFailed`. Then submits and aborts go down;
one :class:`StepFrame` per pass, failures and status changes come up, and what was asked for. The
frontend ends when the socket closes.
"""

from __future__ import annotations

import enum

import msgspec

from pdx.errors import RequestError
from pdx.metrics.timeline import RequestTimeline
from pdx.metrics.transfers import Transfers
from pdx.request.batch import ScoredToken
from pdx.request.ids import IdArray
from pdx.request.names import RequestNames
from pdx.request.request import FinishReason, SamplingParams

__all__ = [
    "Abort",
    "AbortReason",
    "FromFrontend",
    "FrontendConfig",
    "FrontendFailed",
    "FrontendReady",
    "NodeStatus",
    "StepFrame",
    "StreamFailed",
    "StreamUpdate",
    "Submit",
    "ToFrontend",
    "TransfersAsked",
    "TransfersTold",
]


class FrontendConfig(msgspec.Struct, frozen=True, kw_only=True, tag="config"):
    """What the frontend needs to check requests before anyone is asked for work."""

    model_folder: str
    #: The name under which the model is served.
    model_name: str
    #: Prompt plus output tokens of one request, at most.
    context_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    #: Address to bind; port 0 picks a free one.
    host: str
    port: int
    #: Streams at once; more get a 503.
    max_streams: int
    #: Clients must send it as a bearer token or x-api-key (all paths but those of probes); None:
    #: anyone may ask.
    api_key: str | None = None
    #: Longest time for one HTTP request, from its first byte to the answer's last; None: no limit.
    request_timeout_s: float | None = 3600.0
    #: Longest request body.
    max_body_bytes: int = 16 << 20
    #: Web origins whose scripts may use the API ("*": all); none: CORS is off.
    cors_origins: tuple[str, ...] = ()
    #: Fields of a body that nobody knows are dropped with a warning; else they are refused.
    ignore_unknown_fields: bool = False
    #: Longest time for a request's header, from the connection or the header's first byte on.
    header_timeout_s: float = 20.0
    #: Longest time for a request's body.
    body_timeout_s: float = 60.0
    #: How long a connection without a request is kept for the next.
    keep_alive_s: float = 75.0
    #: Connections at once; None: as many as the process may have descriptors for.
    max_connections: int | None = None


class FrontendReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The HTTP port is open."""

    host: str
    port: int


class FrontendFailed(msgspec.Struct, frozen=True, kw_only=True, tag="frontend_failed"):
    """The frontend cannot start. ``kind`` is the error class's name in pdx.errors."""

    kind: str
    message: str
    hint: str | None = None


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A new stream. ``stream_id`` is made by the frontend, unique over its life."""

    stream_id: int
    token_ids: IdArray
    sampling: SamplingParams
    #: Only requests with the same one share pages of the prefix cache.
    cache_salt: str = ""
    #: The ids of the request whose choice it is.
    names: RequestNames = RequestNames()


class AbortReason(enum.StrEnum):
    """Why the frontend wants no more of a stream."""

    #: Its text is complete: a stop string came.
    COMPLETE = "stop string"
    #: Its client has left.
    LEFT = "left"
    #: It took longer than the server allows.
    TIMEOUT = "timeout"
    #: Another choice of the same request failed.
    SIBLING_FAILED = "failed"


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """The stream's tokens are wanted no more. Where it is complete and has not ended, the primary
    answers with a last update without tokens, which brings the timeline; else with nothing.
    """

    stream_id: int
    why: AbortReason = AbortReason.LEFT


class StreamUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one stream; the last update has a finish reason and the timeline."""

    stream_id: int
    token_ids: list[int]
    #: One for each of ``token_ids``, where the request asks for log-probabilities.
    logprobs: list[ScoredToken] = []
    #: Scores of the prompt's tokens from position 1 on, in the first update of a request that asks
    #: for them.
    prompt_logprobs: list[ScoredToken] = []
    #: Tokens of the prompt that nobody had to compute.
    num_cached: int = 0
    #: Control address of the node that prefilled the prompt, in the first update; None: this one.
    prefiller: str | None = None
    finish_reason: FinishReason | None = None
    timeline: RequestTimeline | None = None


class StepFrame(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """All updates of one pass."""

    updates: list[StreamUpdate]


class StreamFailed(msgspec.Struct, frozen=True, kw_only=True, tag="stream_failed"):
    """The stream ended without a result. Fields as of PdxError."""

    stream_id: int
    http_status: int
    kind: str
    message: str

    def as_error(self) -> RequestError:
        """The error that the stream ended with."""
        error = RequestError(self.message)
        error.http_status, error.kind = self.http_status, self.kind
        return error


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """State of the node, for /health; sent when it changes. ``counts`` are page states and queue
    lengths.
    """

    healthy: bool
    detail: str
    counts: dict[str, int]


class TransfersAsked(msgspec.Struct, frozen=True, kw_only=True, tag="transfers_asked"):
    """Somebody wants to see the node's transfers; answered by TransfersTold."""

    query_id: int


class TransfersTold(msgspec.Struct, frozen=True, kw_only=True, tag="transfers_told"):
    """The node's transfers, for the query of this id."""

    query_id: int
    transfers: Transfers


ToFrontend = FrontendConfig | StepFrame | StreamFailed | NodeStatus | TransfersTold
FromFrontend = FrontendReady | FrontendFailed | Submit | Abort | TransfersAsked
