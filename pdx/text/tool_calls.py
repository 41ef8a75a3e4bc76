"""Finds tool calls in a model's text, in the form in which its chat template has them written:

- ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen;
- ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``:
  Qwen3-Coder, whose values are typed by the tools' schemas;
- ``{"name": ..., "parameters": {...}}`` and nothing else, several apart by ``;``: Llama 3;
- DeepSeek's tags around each call and around all of them, with the arguments in a block of Markdown
  (V3, R1) or without (V3.1).

Owned by whoever serves one output. A call goes out when it is complete, Llama's at the end. What
looks like a call and is none stays text.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, assert_never

from pdx.text.partial_match import partial_len

__all__ = ["CallFinder", "CallForm", "ToolCall", "call_finder", "call_form_of"]

_CALL_START, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_BLOCK_START, _BLOCK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_ONE_START, _ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model asks for."""

    name: str
    #: JSON of an object.
    arguments: str


class CallForm(enum.Enum):
    """How a model writes its calls."""

    TAGGED = enum.auto()
    TAGGED_XML = enum.auto()
    BARE = enum.auto()
    DEEPSEEK = enum.auto()


class CallFinder(Protocol):
    """Of one output."""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text and the calls that this piece completes."""

    def flush(self) -> tuple[str, list[ToolCall]]:
        """What was held back, at the end of the output."""


def call_form_of(template: str) -> CallForm | None:
    """The form that a chat template's source teaches; None: none that is known here."""
    if _CALL_START in template:
        return CallForm.TAGGED_XML if "<function=" in template else CallForm.TAGGED
    if _BLOCK_START in template:
        return CallForm.DEEPSEEK
    if '"parameters": dictionary of argument name' in template:
        return CallForm.BARE
    return None


def call_finder(form: CallForm, tools: Sequence[Mapping[str, Any]] = ()) -> CallFinder:
    """A fresh finder for one output, whose model was shown these tools."""
    match form:
        case CallForm.TAGGED:
            return TaggedCallFinder(_CALL_START, _CALL_END, _parse_tagged)
        case CallForm.TAGGED_XML:
            schemas = {tool["function"]["name"]: _properties(tool["function"]) for tool in tools}
            return TaggedCallFinder(_CALL_START, _CALL_END, partial(_parse_xml, schemas))
        case CallForm.DEEPSEEK:
            return TaggedCallFinder(_BLOCK_START, _BLOCK_END, _parse_deepseek)
        case CallForm.BARE:
            return BareCallFinder()
    assert_never(form)


class BareCallFinder:
    """For models whose whole answer is a call, or several: what begins like one is held back."""

    def __init__(self) -> None:
        self._held = ""
        #: None: nothing but white space has come.
        self._may_be_call: bool | None = None

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """See CallFinder."""
        self._held += text
        if self._may_be_call is None:
            begin = self._held.lstrip()
            if not _PYTHON_TAG.startswith(begin):
                self._may_be_call = begin.startswith(("{", _PYTHON_TAG))
        if self._may_be_call is not False:
            return "", []
        words, self._held = self._held, ""
        return words, []

    def flush(self) -> tuple[str, list[ToolCall]]:
        """See CallFinder."""
        calls = _parse_bare(self._held.strip().removeprefix(_PYTHON_TAG))
        return ("", calls) if calls else (self._held, [])


class TaggedCallFinder:
    """Calls between two tags. White space in front of a call, and after the last one, goes to
    neither.
    """

    def __init__(self, start: str, end: str, parse: Callable[[str], list[ToolCall]]) -> None:
        self._start = start
        self._end = end
        self._parse = parse
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
                body, tag, text = text.partition(self._end)
                if not tag:
                    self._held = body
                    break
                self._is_inside = False
                self._add(self._parse(body), body + self._end, words, calls)
            else:
                before, tag, text = text.partition(self._start)
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
        self._add(self._parse(held), held, words, calls)
        return "".join(words), calls

    def _hold_end(self, before: str, words: list[str]) -> None:
        """Keep back the white space in front of a call, or of what may become one."""
        cut = len(before) if self._is_inside else len(before) - partial_len(before, (self._start,))
        cut = len(before[:cut].rstrip())
        words.append(before[:cut])
        if self._is_inside:
            self._gap = before[cut:]
        else:
            self._held = before[cut:]

    def _add(
        self, found: list[ToolCall], raw: str, words: list[str], calls: list[ToolCall]
    ) -> None:
        if found:
            self._has_called = True
            calls += found
        else:
            words.append(self._gap + self._start + raw)


def _parse_tagged(body: str) -> list[ToolCall]:
    call = _as_call(_json(body))
    return [] if call is None else [call]


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON schemas of a tool's arguments; the client may have sent anything."""
    parameters = function.get("parameters")
    found = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _parse_xml(schemas: Mapping[str, Mapping[str, Any]], body: str) -> list[ToolCall]:
    function = _FUNCTION.fullmatch(body)
    if function is None:
        return []
    name, inside = function[1].strip(), function[2]
    if _PARAMETER.sub("", inside).strip():
        return []
    properties = schemas.get(name, {})
    arguments = {
        key: _typed(value, properties.get(key)) for key, value in _PARAMETER.findall(inside)
    }
    call = _as_call({"name": name, "arguments": arguments})
    return [] if call is None else [call]


def _typed(value: str, schema: Any) -> Any:
    """A value is written without quotes: what it is, its schema says; a text where it does not."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind is None or kind == "string":
        return value
    found = _json(value)
    return value if found is _NO_JSON else found


def _parse_bare(text: str) -> list[ToolCall]:
    """Objects one after the other; none of them is a call where one is not."""
    decoder = json.JSONDecoder()
    calls = []
    while text:
        try:
            found, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return []
        call = _as_call(found)
        # Without arguments it is some other object that has a name.
        if call is None or found.keys().isdisjoint({"parameters", "arguments"}):
            return []
        calls.append(call)
        text = text[end:].lstrip("; \r\n\t")
    return calls


def _parse_deepseek(body: str) -> list[ToolCall]:
    before, *parts = body.split(_ONE_START)
    calls = [_as_deepseek_call(part.strip().removesuffix(_ONE_END)) for part in parts]
    found = [call for call in calls if call is not None]
    return found if len(found) == len(calls) and not before.strip() else []


def _as_deepseek_call(part: str) -> ToolCall | None:
    """``function SEPARATOR name, a fenced block``, or ``name SEPARATOR arguments``."""
    name, _, arguments = part.partition(_SEPARATOR)
    if _FENCE in arguments:
        name, _, arguments = arguments.partition(_FENCE)
        arguments = arguments.removeprefix("json").rpartition(_FENCE)[0]
    return _as_call({"name": name.strip(), "arguments": _json(arguments)})


def _as_call(call: Any) -> ToolCall | None:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        arguments = _json(arguments)
        if arguments is _NO_JSON:
            return None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name=call["name"], arguments=json.dumps(arguments, ensure_ascii=False))


#: Told apart from null.
_NO_JSON = object()


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _NO_JSON
