"""What happened to one request, in seconds since its arrival at the decoder's primary."""

from __future__ import annotations

import msgspec

__all__ = ["ChunkSpan", "LandedShare", "RequestTimeline"]


class ChunkSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the prompt in one pass of the node that prefilled it."""

    #: The pass computed the positions before this one that no earlier chunk had.
    end_position: int
    start_s: float
    #: None: the node had not taken in the pass when it told of its work.
    end_s: float | None = None


class LandedShare(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the KV cache had landed at a moment."""

    at_s: float
    #: 0 to 1.
    share: float


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """Filled in by the engine that ran the request; None where a step did not happen, its clock
    is another host's, or (the prefiller's) an answer of a few tokens ended before it was told.
    """

    prompt_len: int
    output_len: int
    #: Control address of the prefiller; None when the prompt was prefilled on this node.
    prefiller: str | None = None
    #: libfabric provider that carried the KV cache.
    provider: str | None = None
    #: KV bytes that arrived by remote writes.
    transfer_bytes: int = 0
    #: Share of these bytes counted by the receiver before the last layer of the last chunk was
    #: done, 0 to 1.
    hidden_share: float | None = None
    #: Pages were leased for the request: the end of its time in the queue.
    admitted_s: float | None = None
    #: The prefill request left for the prefiller.
    dispatched_s: float | None = None
    #: The prefiller's first pass with this request began.
    prefill_start_s: float | None = None
    #: The last layer of the last chunk was done (seen by the prefiller's fabric worker).
    last_layer_s: float | None = None
    #: The prefiller's own completions were all in.
    posted_s: float | None = None
    #: The receiver's count was complete.
    arrived_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    #: Transfers that failed before the one that succeeded.
    num_retries: int = 0
    #: What the prefilling node did, in order.
    chunks: list[ChunkSpan] = []
    #: The KV cache's way into our memory, in order, thinned out.
    landed: list[LandedShare] = []
