"""What a client asks for, after the frontend has resolved every default. Frozen; shared by all
processes.
"""

from __future__ import annotations

import enum

import msgspec

__all__ = ["FinishReason", "SamplingParams"]


class FinishReason(enum.StrEnum):
    """Why a request's output ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn. All fields are resolved: the frontend has filled in defaults and a
    seed.
    """

    #: Largest number of output tokens, >= 1.
    max_tokens: int
    #: 0 is greedy.
    temperature: float = 1.0
    #: Keep the smallest set of most likely tokens whose probabilities sum to at least this; 1 keeps
    #: all.
    top_p: float = 1.0
    #: Output token i draws from Philox(seed, i), so that a retry or another decoder repeats it. 64
    #: bits, unsigned.
    seed: int = 0
    #: Token ids that end the output (the model's EOS ids, unless the client ignores them). The
    #: token itself is output.
    stop_token_ids: tuple[int, ...] = ()
