"""Takes a model's reasoning (``<think>...</think>`` before the answer) apart from its answer, in a
text that comes in pieces.

Owned by whoever serves one output. White space around either part is dropped: templates put line
breaks there that belong to neither.

Models forget to end their reasoning before they call a tool. So where tool calls are looked for, a
complete call in reasoning that is never ended ends it, and belongs to the answer with all that
follows. If the reasoning is ended behind the call, it was only mentioned. Which of the two it is
cannot be known before: from a complete call on, reasoning is held back until the end tag comes or
the output ends. What begins like a call is held back only as long as it may become one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from pdx.text.calls import CallFinder, Part, ToolCall
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
    """One output. A start tag counts only as the first thing of an output: later ones are words.
    Models write it there though the prompt has ended with it.

    Args:
        is_open: The prompt has ended with the start tag, so the output begins inside the reasoning.
        finder: A fresh one, where tool calls are looked for.
    """

    def __init__(self, *, is_open: bool, finder: CallFinder | None = None) -> None:
        self._at = _At.START
        self._is_open = is_open
        self._thoughts = _Thoughts(finder)
        #: White space at the output's start; it is the answer's if there is no reasoning.
        self._lead: list[str] = []
        #: May be the beginning of a tag.
        self._held = ""

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
        if self._at is _At.START and self._is_open:
            return self._with_lead(held).strip(), ""
        if self._at is not _At.REASONING:
            return "", self._with_lead(held)
        reasoning = self._thoughts.push(held)
        more, answer = self._thoughts.break_off()
        return reasoning + more, answer

    def _begin(self, text: str) -> str:
        """What follows the start tag, or the answer's beginning."""
        stripped = text.lstrip()
        self._lead.append(text[: len(text) - len(stripped)])
        if stripped.startswith(THINK_START):
            self._at = _At.REASONING
            self._lead.clear()
            return stripped.removeprefix(THINK_START)
        if THINK_START.startswith(stripped):  # also nothing but white space so far
            self._held = stripped
            return ""
        self._at = _At.REASONING if self._is_open else _At.ANSWER
        return self._with_lead(stripped)

    def _with_lead(self, text: str) -> str:
        lead = "".join(self._lead)
        self._lead.clear()
        return lead + text

    def _reason(self, text: str) -> tuple[str, str]:
        """The reasoning in ``text``, and what follows its end."""
        thoughts, tag, rest = text.partition(THINK_END)
        if tag:
            self._at = _At.GAP
            return self._thoughts.push(thoughts) + self._thoughts.end(), rest
        cut = len(text) - partial_len(text, (THINK_END,))
        self._held = text[cut:]
        return self._thoughts.push(text[:cut]), ""


class _Thoughts:
    """The text between the tags, without the white space at its ends."""

    def __init__(self, finder: CallFinder | None) -> None:
        self._finder = finder
        self._has_call = False
        #: Text that may belong to a call, or follows one.
        self._held: list[str] = []
        #: White space that goes out if words follow.
        self._gap: list[str] = []
        self._has_begun = False

    def push(self, text: str) -> str:
        """What goes out of the text so far."""
        if self._finder is None:
            return self._say(text)
        self._held.append(text)
        return "" if self._has_call else self._say(self._before_call(self._finder.push_parts(text)))

    def end(self) -> str:
        """The rest, where the reasoning is ended."""
        return self._say("".join(self._held))

    def break_off(self) -> tuple[str, str]:
        """The rest, where the output ends without its being ended; and the answer, from a call
        on."""
        reasoning = ""
        if self._finder is not None and not self._has_call:
            reasoning = self._say(self._before_call(self._finder.flush_parts()))
        return reasoning, "".join(self._held).lstrip()

    def _before_call(self, parts: Sequence[Part]) -> str:
        """Words that the finder lets out; up to the first call they are the text itself."""
        length = 0
        for part in parts:
            if isinstance(part, ToolCall):
                self._has_call = True
                break
            length += len(part)
        if not length:
            return ""
        held = "".join(self._held)
        self._held = [held[length:]]
        return held[:length]

    def _say(self, text: str) -> str:
        words = text.rstrip()
        tail = text[len(words) :]
        if words:
            gap = "".join(self._gap) if self._has_begun else ""
            words = gap + (words if self._has_begun else words.lstrip())
            self._has_begun = True
            self._gap.clear()
        self._gap.append(tail)
        return words
