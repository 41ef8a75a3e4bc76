"""Takes a model's reasoning (``<think>...</think>`` before the answer) apart from its answer, in a
text that comes in pieces.

Owned by whoever serves one output. White space around either part is dropped: templates put line
breaks there that belong to neither.
"""

from __future__ import annotations

import enum

from pdx.text.partial_match import partial_len

__all__ = ["THINK_END", "THINK_START", "ReasoningSplitter"]

THINK_START = "<think>"
THINK_END = "</think>"


class _At(enum.Enum):
    START = enum.auto()
    REASONING = enum.auto()
    #: Between the reasoning's end and the answer's first word.
    GAP = enum.auto()
    ANSWER = enum.auto()


class ReasoningSplitter:
    """One output. ``is_open``: the prompt has ended with the start tag, so the output begins inside
    the reasoning.

    A start tag counts only as the first thing of an output: later ones are the answer's words.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._at = _At.REASONING if is_open else _At.START
        self._held = ""
        #: Reasoning has begun to go out, so that white space in front of more is part of it.
        self._has_begun = False

    def push(self, text: str) -> tuple[str, str]:
        """What this piece adds to the reasoning, and to the answer."""
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._at is _At.START:
            text = self._begin(text)
        if self._at is _At.REASONING:
            reasoning, text = self._reason(text)
        if self._at is _At.GAP:
            text = text.lstrip()
            self._at = _At.ANSWER if text else _At.GAP
        return reasoning, text if self._at is _At.ANSWER else ""

    def flush(self) -> tuple[str, str]:
        """What was held back, at the end of the output."""
        held, self._held = self._held, ""
        if self._at is _At.REASONING:
            return self._trimmed(held.rstrip()), ""
        return "", held

    def _begin(self, text: str) -> str:
        stripped = text.lstrip()
        if stripped.startswith(THINK_START):
            self._at = _At.REASONING
            return stripped.removeprefix(THINK_START)
        if THINK_START.startswith(stripped):  # also nothing but white space so far
            self._held = text
        else:
            self._at = _At.ANSWER
        return text

    def _reason(self, text: str) -> tuple[str, str]:
        """The reasoning in ``text``, and what follows its end."""
        reasoning, tag, rest = text.partition(THINK_END)
        if tag:
            self._at = _At.GAP
            return self._trimmed(reasoning.rstrip()), rest
        cut = len(text) - partial_len(text, (THINK_END,))
        cut = len(text[:cut].rstrip())
        self._held = text[cut:]
        return self._trimmed(text[:cut]), ""

    def _trimmed(self, reasoning: str) -> str:
        if not self._has_begun:
            reasoning = reasoning.lstrip()
        self._has_begun = self._has_begun or bool(reasoning)
        return reasoning
