"""OpenAI's response bodies: plain and streamed. Pure; one object per HTTP request.

Chunks are encoded by msgspec, not by pydantic: at hundreds of streams this code runs for every
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from pdx import __version__
from pdx.request.request import FinishReason

__all__ = [
    "AnswerHead",
    "AnswerShape",
    "ChatShape",
    "CompletionShape",
    "Delta",
    "FullChoice",
    "Usage",
]

_encode = msgspec.json.Encoder().encode
_FINGERPRINT = f"pdx-{__version__}"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts; ``completion_tokens`` has the stop token, which is not in the text."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one update adds to one choice."""

    choice_idx: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FullChoice:
    """One choice at its end."""

    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason


class AnswerShape(Protocol):
    """One endpoint's bodies for one request. Streamed frames carry their SSE framing."""

    @property
    def head(self) -> AnswerHead:
        """What all its bodies begin with."""

    def whole(self, choices: Sequence[FullChoice], usage: Usage) -> bytes:
        """The body of a plain answer."""

    def opening(self, prompts: Sequence[list[int]]) -> list[bytes]:
        """Frames before the first token; ``prompts`` are the choices' token ids."""

    def chunk(self, delta: Delta) -> bytes | None:
        """The frame of one update; None where it would say nothing."""

    def closing(self, usage: Usage) -> list[bytes]:
        """Frames after the last token of the last choice."""


class _CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class _ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: _Message
    logprobs: None = None
    finish_reason: FinishReason
    token_ids: list[int] | UnsetType = UNSET


class _ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class _ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: _ChatDelta
    logprobs: None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


_Choices: TypeAlias = list[_CompletionChoice] | list[_ChatChoice] | list[_ChatChunkChoice]


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str = _FINGERPRINT
    choices: _Choices
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every body of one answer carries, and what the client asked to see besides the text."""

    #: The API id, made by the server.
    request_id: str
    model: str
    #: Unix time, seconds.
    created: int
    with_token_ids: bool
    #: A streamed answer ends with a frame of usage; the frames before then say ``"usage": null``.
    with_usage: bool

    def ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        """Token ids where they were asked for."""
        return token_ids if self.with_token_ids else UNSET

    def body(
        self,
        kind: str,
        choices: _Choices,
        usage: Usage | UnsetType | None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        """The JSON of one body."""
        body = _Body(
            id=self.request_id,
            object=kind,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )
        return _encode(body)

    def frame(
        self, kind: str, choices: _Choices, prompt_token_ids: list[int] | UnsetType = UNSET
    ) -> bytes:
        """The frame of one chunk."""
        usage = None if self.with_usage else UNSET
        return b"data: %b\n\n" % self.body(kind, choices, usage, prompt_token_ids)

    def usage_frames(self, kind: str, usage: Usage) -> list[bytes]:
        """The last frame, where usage was asked for."""
        return [b"data: %b\n\n" % self.body(kind, [], usage)] if self.with_usage else []

    def says_nothing(self, delta: Delta) -> bool:
        """Half a character arrived: without ids to show there is no frame to send."""
        return not (delta.text or delta.finish_reason or (self.with_token_ids and delta.token_ids))


class CompletionShape:
    """``text_completion``, plain and streamed."""

    _KIND = "text_completion"

    def __init__(self, head: AnswerHead) -> None:
        self.head = head

    def whole(self, choices: Sequence[FullChoice], usage: Usage) -> bytes:
        """See AnswerShape."""
        bodies = [self._whole_choice(idx, choice) for idx, choice in enumerate(choices)]
        return self.head.body(self._KIND, bodies, usage)

    def opening(self, prompts: Sequence[list[int]]) -> list[bytes]:
        """Nothing, but for the prompts' ids where the client asked for ids."""
        if not self.head.with_token_ids:
            return []
        choices = [
            _CompletionChoice(index=idx, text="", token_ids=[], prompt_token_ids=token_ids)
            for idx, token_ids in enumerate(prompts)
        ]
        return [self.head.frame(self._KIND, [choice]) for choice in choices]

    def chunk(self, delta: Delta) -> bytes | None:
        """See AnswerShape."""
        if self.head.says_nothing(delta):
            return None
        choice = _CompletionChoice(
            index=delta.choice_idx,
            text=delta.text,
            finish_reason=delta.finish_reason,
            token_ids=self.head.ids(delta.token_ids),
        )
        return self.head.frame(self._KIND, [choice])

    def closing(self, usage: Usage) -> list[bytes]:
        """See AnswerShape."""
        return self.head.usage_frames(self._KIND, usage)

    def _whole_choice(self, idx: int, choice: FullChoice) -> _CompletionChoice:
        return _CompletionChoice(
            index=idx,
            text=choice.text,
            finish_reason=choice.finish_reason,
            token_ids=self.head.ids(choice.token_ids),
            prompt_token_ids=self.head.ids(choice.prompt_token_ids),
        )


class ChatShape:
    """``chat.completion`` and ``chat.completion.chunk``."""

    _KIND = "chat.completion"
    _CHUNK_KIND = "chat.completion.chunk"

    def __init__(self, head: AnswerHead) -> None:
        self.head = head

    def whole(self, choices: Sequence[FullChoice], usage: Usage) -> bytes:
        """See AnswerShape."""
        bodies = [self._whole_choice(idx, choice) for idx, choice in enumerate(choices)]
        prompt_ids = self.head.ids(choices[0].prompt_token_ids)
        return self.head.body(self._KIND, bodies, usage, prompt_ids)

    def opening(self, prompts: Sequence[list[int]]) -> list[bytes]:
        """The role comes first, in a frame of its own."""
        choice = _ChatChunkChoice(index=0, delta=_ChatDelta(role="assistant", content=""))
        return [self.head.frame(self._CHUNK_KIND, [choice], self.head.ids(prompts[0]))]

    def chunk(self, delta: Delta) -> bytes | None:
        """See AnswerShape."""
        if self.head.says_nothing(delta):
            return None
        # The last frame of a choice may have no text left to say.
        content: str | UnsetType = UNSET if delta.finish_reason and not delta.text else delta.text
        choice = _ChatChunkChoice(
            index=delta.choice_idx,
            delta=_ChatDelta(content=content),
            finish_reason=delta.finish_reason,
            token_ids=self.head.ids(delta.token_ids),
        )
        return self.head.frame(self._CHUNK_KIND, [choice])

    def closing(self, usage: Usage) -> list[bytes]:
        """See AnswerShape."""
        return self.head.usage_frames(self._CHUNK_KIND, usage)

    def _whole_choice(self, idx: int, choice: FullChoice) -> _ChatChoice:
        return _ChatChoice(
            index=idx,
            message=_Message(content=choice.text),
            finish_reason=choice.finish_reason,
            token_ids=self.head.ids(choice.token_ids),
        )
