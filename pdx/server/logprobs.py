"""Log-probabilities in OpenAI's two shapes. Pure.

A token is shown as its text. One whose bytes are no text by themselves (a part of a character) is
shown as ``bytes:\\xe2\\x80``, as OpenAI's server does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from pdx.server.deltas import TokenScore

__all__ = ["ChatLogprobs", "CompletionLogprobs", "chat_logprobs", "completion_logprobs"]

#: JSON has no infinity; a token that cannot be drawn gets vLLM's number for it.
_LOWEST = -9999.0

#: The bytes of a token, by its id.
BytesOf: TypeAlias = Callable[[int], bytes]


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Lists of equal length, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token that might have been drawn."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token that was drawn."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of a chat message, or of a chunk of one."""

    content: list[TokenLogprob]
    refusal: None = None


def completion_logprobs(scores: Sequence[TokenScore], bytes_of: BytesOf) -> CompletionLogprobs:
    """``logprobs`` of a completion's choice."""
    return CompletionLogprobs(
        tokens=[_shown(bytes_of(score.token_id)) for score in scores],
        token_logprobs=[None if s.logprob is None else max(s.logprob, _LOWEST) for s in scores],
        top_logprobs=[_top_by_text(score, bytes_of) for score in scores],
        text_offset=[score.text_offset for score in scores],
    )


def chat_logprobs(scores: Sequence[TokenScore], bytes_of: BytesOf) -> ChatLogprobs:
    """``logprobs`` of a message's choice. A message has no echo: each token has a score."""
    return ChatLogprobs(content=[_token_logprob(score, bytes_of) for score in scores])


def _top_by_text(score: TokenScore, bytes_of: BytesOf) -> dict[str, float] | None:
    """The most likely tokens, and the drawn one. Of tokens with one text the likeliest."""
    if score.logprob is None or score.top is None:
        return None
    found: dict[str, float] = {}
    for token_id, logprob in (*score.top, (score.token_id, score.logprob)):
        found.setdefault(_shown(bytes_of(token_id)), max(logprob, _LOWEST))
    return found


def _token_logprob(score: TokenScore, bytes_of: BytesOf) -> TokenLogprob:
    assert score.logprob is not None and score.top is not None
    raw = bytes_of(score.token_id)
    return TokenLogprob(
        token=_shown(raw),
        logprob=max(score.logprob, _LOWEST),
        bytes=list(raw),
        top_logprobs=[_top_logprob(bytes_of(i), logprob) for i, logprob in score.top],
    )


def _top_logprob(raw: bytes, logprob: float) -> TopLogprob:
    return TopLogprob(token=_shown(raw), logprob=max(logprob, _LOWEST), bytes=list(raw))


def _shown(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
