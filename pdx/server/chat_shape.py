"""``chat.completion`` and ``chat.completion.chunk``. Pure; one object per HTTP request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from pdx.server.deltas import Delta, EndReason
from pdx.server.logprobs import ChatLogprobs, chat_logprobs
from pdx.server.shapes import AnswerBody, AnswerHead, ChunkUsage, Usage, encode_body, encode_frame

__all__ = ["ChatAnswer", "ChatChunk", "ChatShape"]


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """What is called, with the JSON of an object."""

    name: str
    arguments: str


class MessageCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of a message; in a chunk with its ``index`` in the message."""

    index: int | UnsetType = UNSET
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's words."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    #: The name under which vLLM, SGLang and DeepSeek tell the reasoning.
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a plain answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: EndReason
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(AnswerBody, frozen=True, kw_only=True):
    """A plain answer."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the assistant's words."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice's piece in a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: EndReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(AnswerBody, frozen=True, kw_only=True):
    """A piece of a streamed answer."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatShape:
    """See AnswerShape."""

    def __init__(self, head: AnswerHead) -> None:
        self.head = head

    def whole(
        self, choices: Sequence[Delta], prompts: Sequence[Sequence[int]], usage: Usage
    ) -> bytes:
        """See AnswerShape."""
        head = self.head
        body = ChatAnswer(
            id=head.request_id,
            created=head.created,
            model=head.model,
            choices=[self._whole_choice(choice) for choice in choices],
            usage=usage,
            prompt_token_ids=head.ids(prompts[0]),
        )
        return encode_body(body)

    def opening(self, prompts: Sequence[Sequence[int]]) -> list[bytes]:
        """The role comes first, in a frame of its own for each choice."""
        first = ChatDelta(role="assistant", content="")
        choices = [ChatChunkChoice(index=idx, delta=first) for idx in range(len(prompts))]
        ids = self.head.ids(prompts[0])
        usage = self.head.chunk_usage(len(prompts[0]), 0, 0)
        return [encode_frame(self._chunk([choice], usage, ids)) for choice in choices]

    def chunk(self, delta: Delta, usage: ChunkUsage) -> bytes | None:
        """See AnswerShape."""
        if self.head.says_nothing(delta):
            return None
        says_more = delta.finish_reason or delta.reasoning or delta.tool_calls
        piece = ChatDelta(
            content=delta.text if delta.text or not says_more else UNSET,
            reasoning_content=self._reasoning(delta),
            tool_calls=self._calls(delta, with_index=True) or UNSET,
        )
        choice = ChatChunkChoice(
            index=delta.choice_idx,
            delta=piece,
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            token_ids=self.head.ids(delta.token_ids),
        )
        return encode_frame(self._chunk([choice], usage))

    def closing(self, usage: Usage) -> list[bytes]:
        """See AnswerShape."""
        return [encode_frame(self._chunk([], usage))] if self.head.with_usage else []

    def _whole_choice(self, choice: Delta) -> ChatChoice:
        assert choice.finish_reason is not None
        calls = self._calls(choice, with_index=False)
        message = ChatMessage(
            content=None if calls and not choice.text else choice.text,
            reasoning_content=self._reasoning(choice),
            tool_calls=calls or UNSET,
        )
        return ChatChoice(
            index=choice.choice_idx,
            message=message,
            logprobs=self._logprobs(choice),
            finish_reason=choice.finish_reason,
            token_ids=self.head.ids(choice.token_ids),
        )

    def _calls(self, delta: Delta, *, with_index: bool) -> list[MessageCall]:
        """A call's id is made of the answer's, so that the same call has one id wherever it is
        told."""
        prefix = f"call_{self.head.request_id.partition('-')[2]}-{delta.choice_idx}"
        return [
            MessageCall(
                index=idx if with_index else UNSET,
                id=f"{prefix}-{idx}",
                function=FunctionCall(name=call.name, arguments=call.arguments),
            )
            for idx, call in enumerate(delta.tool_calls, delta.num_calls_before)
        ]

    def _reasoning(self, delta: Delta) -> str | UnsetType:
        return delta.reasoning if delta.reasoning and self.head.with_reasoning else UNSET

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not (self.head.with_logprobs and (delta.scores or delta.token_ids)):
            return None
        return chat_logprobs(delta.scores, self.head.bytes_of)

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: ChunkUsage,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> ChatChunk:
        head = self.head
        return ChatChunk(
            id=head.request_id,
            created=head.created,
            model=head.model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )
