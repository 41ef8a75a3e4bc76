"""Finds tool calls in a model's text: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``,
as Hermes and Qwen models write them.

Owned by whoever serves one output. A call goes out when it is complete. What looks like a call and
is none stays text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from pdx.text.partial_match import partial_len

__all__ = ["CALL_END", "CALL_START", "ToolCall", "ToolCallFinder"]

CALL_START = "<tool_call>"
CALL_END = "</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model asks for."""

    name: str
    #: JSON of an object.
    arguments: str


class ToolCallFinder:
    """One output. White space in front of a call, and after the last one, goes to neither."""

    def __init__(self) -> None:
        #: Text that may be the start of a tag; inside a call, its body so far.
        self._held = ""
        #: White space in front of the call that is being read.
        self._gap = ""
        self._is_inside = False
        self._has_called = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text and the calls that this piece completes."""
        text, self._held = self._held + text, ""
        words: list[str] = []
        calls: list[ToolCall] = []
        while text:
            if self._is_inside:
                body, tag, text = text.partition(CALL_END)
                if not tag:
                    self._held = body
                    break
                self._is_inside = False
                self._add(_parse(body), body + CALL_END, words, calls)
            else:
                before, tag, text = text.partition(CALL_START)
                self._is_inside = bool(tag)
                self._hold_end(before, words)
        return "".join(words), calls

    def flush(self) -> tuple[str, list[ToolCall]]:
        """What was held back, at the end of the output; models forget the end tag of the last
        call."""
        held, self._held = self._held, ""
        if not self._is_inside:
            return "" if self._has_called and held.isspace() else held, []
        words: list[str] = []
        calls: list[ToolCall] = []
        self._add(_parse(held), held, words, calls)
        return "".join(words), calls

    def _hold_end(self, before: str, words: list[str]) -> None:
        """Keep back the white space in front of a call, or of what may become one."""
        cut = len(before) if self._is_inside else len(before) - partial_len(before, (CALL_START,))
        cut = len(before[:cut].rstrip())
        words.append(before[:cut])
        if self._is_inside:
            self._gap = before[cut:]
        else:
            self._held = before[cut:]

    def _add(
        self, call: ToolCall | None, raw: str, words: list[str], calls: list[ToolCall]
    ) -> None:
        if call is None:
            words.append(self._gap + CALL_START + raw)
        else:
            self._has_called = True
            calls.append(call)


def _parse(body: str) -> ToolCall | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name=call["name"], arguments=json.dumps(arguments, ensure_ascii=False))
