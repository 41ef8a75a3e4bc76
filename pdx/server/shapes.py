"""What all of OpenAI's response bodies have in common. Pure; one object per HTTP request.

Chunks are encoded by msgspec, not by pydantic: at hundreds of streams this code runs for every
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from pdx import __version__
from pdx.server.deltas import Delta
from pdx.server.logprobs import BytesOf

__all__ = [
    "AnswerHead",
    "AnswerShape",
    "ChunkUsage",
    "Usage",
    "encode_body",
    "encode_frame",
    "usage_of",
]

encode_body = msgspec.json.Encoder().encode
#: Names what computes the answers, for clients that compare seeds.
FINGERPRINT = f"pdx-{__version__}"


class PromptDetails(msgspec.Struct, frozen=True, kw_only=True):
    """How many of the prompt's tokens had their KV cache already."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts; ``completion_tokens`` has the token that ended a choice, also where it is not
    in the text."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


#: None: the frame says that it has none. UNSET: it does not say.
ChunkUsage: TypeAlias = Usage | UnsetType | None


def usage_of(prompt_len: int, num_output: int, num_cached: int) -> Usage:
    """Usage of so many tokens."""
    return Usage(
        prompt_tokens=prompt_len,
        completion_tokens=num_output,
        total_tokens=prompt_len + num_output,
        prompt_tokens_details=PromptDetails(cached_tokens=num_cached),
    )


class AnswerBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that every body begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    usage: ChunkUsage = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every body of one answer carries, and what the client asked to see besides the text."""

    #: The API id, made by the server.
    request_id: str
    model: str
    #: Unix time, seconds.
    created: int
    with_token_ids: bool
    with_logprobs: bool
    #: A streamed answer ends with a frame of usage; the frames before then say ``"usage": null``.
    with_usage: bool
    #: Those frames have the usage of their choice up to there instead.
    with_running_usage: bool
    with_reasoning: bool
    bytes_of: BytesOf

    def ids(self, token_ids: Sequence[int]) -> list[int] | UnsetType:
        """Token ids where they were asked for."""
        return list(token_ids) if self.with_token_ids else UNSET

    def chunk_usage(self, prompt_len: int, num_output: int, num_cached: int) -> ChunkUsage:
        """What a frame before the last says of usage, when its choice has so many tokens."""
        if self.with_running_usage:
            return usage_of(prompt_len, num_output, num_cached)
        return None if self.with_usage else UNSET

    def says_nothing(self, delta: Delta) -> bool:
        """Half a character arrived, or what may become a stop string: without ids or scores to show
        there is no frame to send."""
        reasoning = delta.reasoning if self.with_reasoning else ""
        has_words = delta.text or reasoning or delta.tool_calls or delta.finish_reason
        return not (has_words or delta.scores or (self.with_token_ids and delta.token_ids))


class AnswerShape(Protocol):
    """One endpoint's bodies for one request. Streamed frames carry their SSE framing."""

    @property
    def head(self) -> AnswerHead:
        """What all its bodies begin with."""

    def whole(
        self, choices: Sequence[Delta], prompts: Sequence[Sequence[int]], usage: Usage
    ) -> bytes:
        """The body of a plain answer; ``prompts`` are the choices' token ids."""

    def opening(self, prompts: Sequence[Sequence[int]]) -> list[bytes]:
        """Frames before the first token."""

    def chunk(self, delta: Delta, usage: ChunkUsage) -> bytes | None:
        """The frame of one update; None where it would say nothing."""

    def closing(self, usage: Usage) -> list[bytes]:
        """Frames after the last token of the last choice."""


def encode_frame(body: AnswerBody) -> bytes:
    """A body as one server-sent event."""
    return b"data: %b\n\n" % encode_body(body)
