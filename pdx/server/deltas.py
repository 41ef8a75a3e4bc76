"""What the tokens of one choice have become, between reading and writing. Frozen data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pdx.text.calls import ToolCall

__all__ = ["Delta", "EndReason", "TokenScore", "joined"]

#: OpenAI's finish reasons, as far as they occur here.
EndReason: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScore:
    """One token's place in the text and its log-probabilities."""

    token_id: int
    #: Characters of the choice's text in front of the token.
    text_offset: int
    #: None for a prompt's first token, which nothing predicts.
    logprob: float | None
    #: (token id, log-probability), most likely first; None as for ``logprob``.
    top: Sequence[tuple[int, float]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one update adds to one choice; joined, a whole choice."""

    choice_idx: int
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    #: Tool calls of this choice in earlier deltas.
    num_calls_before: int = 0
    token_ids: Sequence[int] = ()
    scores: tuple[TokenScore, ...] = ()
    finish_reason: EndReason | None = None


def joined(deltas: Sequence[Delta]) -> Delta:
    """All deltas of one choice as one."""
    return Delta(
        choice_idx=deltas[0].choice_idx,
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        scores=tuple(score for delta in deltas for score in delta.scores),
        finish_reason=deltas[-1].finish_reason,
    )
