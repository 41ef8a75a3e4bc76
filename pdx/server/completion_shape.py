"""``text_completion``, plain and streamed. Pure; one object per HTTP request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from pdx.server.deltas import Delta, EndReason
from pdx.server.logprobs import CompletionLogprobs, completion_logprobs
from pdx.server.shapes import AnswerBody, AnswerHead, ChunkUsage, Usage, encode_body, encode_frame

__all__ = ["CompletionAnswer", "CompletionShape"]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice, whole or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: EndReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionAnswer(AnswerBody, frozen=True, kw_only=True):
    """A plain answer, and each chunk of a streamed one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class CompletionShape:
    """See AnswerShape."""

    def __init__(self, head: AnswerHead) -> None:
        self.head = head

    def whole(
        self, choices: Sequence[Delta], prompts: Sequence[Sequence[int]], usage: Usage
    ) -> bytes:
        """See AnswerShape."""
        found = [
            self._choice(choice, prompt_token_ids=self.head.ids(prompt))
            for choice, prompt in zip(choices, prompts, strict=True)
        ]
        return encode_body(self._answer(found, usage))

    def opening(self, prompts: Sequence[Sequence[int]]) -> list[bytes]:
        """Nothing, but for the prompts' ids where the client asked for ids."""
        if not self.head.with_token_ids:
            return []
        choices = [
            CompletionChoice(index=idx, text="", token_ids=[], prompt_token_ids=list(ids))
            for idx, ids in enumerate(prompts)
        ]
        usages = (self.head.chunk_usage(len(ids), 0, 0) for ids in prompts)
        return list(map(self._frame, choices, usages))

    def chunk(self, delta: Delta, usage: ChunkUsage) -> bytes | None:
        """See AnswerShape."""
        return None if self.head.says_nothing(delta) else self._frame(self._choice(delta), usage)

    def closing(self, usage: Usage) -> list[bytes]:
        """See AnswerShape."""
        return [encode_frame(self._answer([], usage))] if self.head.with_usage else []

    def _choice(self, delta: Delta, **ids: Any) -> CompletionChoice:
        with_logprobs = self.head.with_logprobs
        return CompletionChoice(
            index=delta.choice_idx,
            text=delta.text,
            logprobs=completion_logprobs(delta.scores, self.head.bytes_of)
            if with_logprobs
            else None,
            finish_reason=delta.finish_reason,
            token_ids=self.head.ids(delta.token_ids),
            **ids,
        )

    def _frame(self, choice: CompletionChoice, usage: ChunkUsage) -> bytes:
        return encode_frame(self._answer([choice], usage))

    def _answer(self, choices: list[CompletionChoice], usage: ChunkUsage) -> CompletionAnswer:
        head = self.head
        return CompletionAnswer(
            id=head.request_id,
            created=head.created,
            model=head.model,
            choices=choices,
            usage=usage,
        )
