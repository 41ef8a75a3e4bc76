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
    #: Keep this many of the most likely tokens; 0 keeps all.
    top_k: int = 0
    #: Drop tokens less likely than this share of the most likely one's probability; 0 drops none.
    min_p: float = 0.0
    #: Taken from a token's logit when it is in the output so far (OpenAI's presence penalty).
    presence_penalty: float = 0.0
    #: Taken from a token's logit for each time it is in the output so far (OpenAI's frequency
    #: penalty).
    frequency_penalty: float = 0.0
    #: Divides positive and multiplies negative logits of tokens in prompt or output; 1 changes
    #: nothing.
    repetition_penalty: float = 1.0
    #: Added to the logits of these token ids.
    logit_bias: dict[int, float] = {}
    #: The stop tokens cannot be drawn before this many output tokens.
    min_tokens: int = 0
    #: Report each output token's log-probability and this many of the most likely ones'; None:
    #: neither.
    logprobs: int | None = None
    #: Score the prompt's own tokens the same way; None: do not.
    prompt_logprobs: int | None = None
    #: Output token i draws from Philox(seed, i), so that a retry or another decoder repeats it. 64
    #: bits, unsigned.
    seed: int = 0
    #: Token ids that end the output (the model's EOS ids, unless the client ignores them). The
    #: token itself is output.
    stop_token_ids: tuple[int, ...] = ()
