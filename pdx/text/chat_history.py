"""The messages of a chat in one spelling, and the ways in which templates want them. Pure.

Clients spell one message in many ways: an empty content as null, "" or [], an absent key as null or
an empty list, arguments of a call as an object or as its JSON. ``canonical`` makes one spelling of
them. Templates differ too: some write a call only where the content is null, some take arguments
only as text, some forget the words beside a call. A ``Reading`` is one way to hand them over, and
a ``Shadow`` is the same chat with a mark for each of its parts: the marks that a rendered shadow
lacks are the parts that a template leaves out. ``pdx.text.chat_template`` picks the reading.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pdx.errors import InvalidRequest

__all__ = ["Lost", "Reading", "Shadow", "canonical", "fold", "sample_of"]

Message = dict[str, Any]

#: Clients' names for the thoughts of an earlier answer; templates read one or another of them.
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
#: Some templates take ids of nine characters only.
_SHORT_ID = "call{:05d}"
_NO_PARAMETERS = {"type": "object", "properties": {}}


def _is_blank(value: object) -> bool:
    """An optional key with such a value means the same as no key."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def _flatten(parts: Sequence[Any]) -> str:
    """The text of a content given as a list of parts.

    Raises:
        InvalidRequest: a part is neither a text nor a refusal.
    """
    return "".join(map(_text_of_part, parts))


def _text_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(kind) if kind in ("text", "refusal") else part
    if kind is None or not isinstance(text, str | None):
        raise InvalidRequest(
            f'a content part must be {{"type": "text", "text": ...}}, got type {kind!r}',
            param="messages",
        )
    return text or ""


def canonical(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages in one spelling: ``content`` is a text, what says nothing is not there, calls
    are ``tool_calls`` with arguments as an object (as a text only where they are no JSON of one),
    and each result names its call where that is known.

    Raises:
        InvalidRequest: a content part is no text.
    """
    plain = [_plain(message) for message in messages]
    _pair_results(plain)
    return plain


def _plain(message: Mapping[str, Any]) -> Message:
    plain = {key: value for key, value in message.items() if not _is_blank(value)}
    content = plain.get("content", "")
    plain["content"] = _flatten(content) if isinstance(content, list) else content
    if not plain["content"] and isinstance(plain.get("refusal"), str):
        plain["content"] = plain["refusal"]
    thoughts = next((plain[key] for key in _REASONING_KEYS if key in plain), None)
    if isinstance(thoughts, str):
        plain |= dict.fromkeys(_REASONING_KEYS, thoughts)
    legacy = plain.pop("function_call", None)
    if isinstance(legacy, Mapping) and "tool_calls" not in plain:
        plain["tool_calls"] = [{"function": legacy}]
    if plain.get("role") == "function":  # the name that tool results had at first
        plain["role"] = "tool"
    if "tool_call_id" in plain:
        plain["tool_call_id"] = str(plain["tool_call_id"])
    if "tool_calls" in plain:
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
        if not plain["content"].strip():
            plain["content"] = ""  # models write line breaks between their thoughts and a call
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in call.items() if not _is_blank(value)}
    if "id" in kept:
        kept["id"] = str(kept["id"])
    function = {key: value for key, value in call["function"].items() if value is not None}
    arguments = _plain_arguments(function.get("arguments"))
    return {"type": "function", **kept, "function": {**function, "arguments": arguments}}


def _plain_arguments(arguments: Any) -> Any:
    """An object, or the text as it is: a call that was cut off cannot be mended by anybody."""
    if not isinstance(arguments, str):
        return arguments or {}
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
        json.dumps(parsed, ensure_ascii=False).encode()  # half of a surrogate pair has no UTF-8
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _pair_results(messages: Sequence[Message]) -> None:
    """Give calls without an id one, and results without one the id of the call that they answer:
    the first that waits, of the name that they give."""
    num_calls = 0
    waiting: dict[str | None, deque[str]] = {}  # of each name, and of any
    answered: set[str] = set()
    for message in messages:
        role, name = message.get("role"), message.get("name")
        if role == "user":
            waiting, answered = {}, set()
        for call in message.get("tool_calls", ()):
            found = call.setdefault("id", _SHORT_ID.format(num_calls))
            num_calls += 1
            answered.discard(found)
            for key in (None, call["function"]["name"]):
                waiting.setdefault(key, deque()).append(found)
        if role == "tool":
            ids = waiting.get(name if isinstance(name, str) else None, deque())
            while ids and ids[0] in answered:
                ids.popleft()
            if "tool_call_id" not in message and ids:
                message["tool_call_id"] = ids[0]
            if "tool_call_id" in message:
                answered.add(message["tool_call_id"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One way to hand a canonical chat to a template."""

    #: The content of a message that has calls and no words.
    no_content: str | None = ""
    #: Arguments are given as JSON text.
    text_arguments: bool = False
    #: Arguments that are no JSON object are given as an object with that text in it.
    boxed_arguments: bool = False
    #: A message has one call at most; its result follows before the next call.
    one_call_each: bool = False
    #: Words beside calls are a message of their own, before that with the calls.
    words_apart: bool = False
    #: Words beside calls join the answer that comes of them, or are one message before the calls:
    #: where users and assistant must take turns.
    words_joined: bool = False
    #: Ids of calls have nine characters.
    short_ids: bool = False
    #: What is optional in a tool and in a result is there.
    filled: bool = False
    #: Contents are lists of text parts.
    as_parts: bool = False

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """The chat as the template is given it."""
        changed: Iterator[Message] = iter(messages)
        if self.one_call_each:
            changed = _one_call_each(messages)
        if self.words_apart:
            changed = _words_apart(changed)
        if self.words_joined:
            changed = _words_joined(changed)
        if self.filled:
            changed = _with_names(changed)
        if self.short_ids:
            changed = _with_short_ids(changed)
        return [self._message(message) for message in changed]

    def tools(self, tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
        """The tools as the template is given them; None where there are none."""
        if not tools:
            return None
        return [_plain_tool(tool, filled=self.filled) for tool in tools]

    def _message(self, message: Message) -> Message:
        content: Any = message["content"]
        if self.as_parts and content:
            content = [{"type": "text", "text": content}]
        if "tool_calls" not in message:
            return {**message, "content": content}
        calls = [self._call(call) for call in message["tool_calls"]]
        return {**message, "content": content or self.no_content, "tool_calls": calls}

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = call["function"]["arguments"]
        if self.boxed_arguments and isinstance(arguments, str):
            arguments = {"arguments": arguments}
        if self.text_arguments and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}


def _plain_tool(tool: Mapping[str, Any], *, filled: bool) -> Mapping[str, Any]:
    function = {key: value for key, value in tool["function"].items() if value is not None}
    if filled:
        function = {"description": "", "parameters": _NO_PARAMETERS} | function
    return {**tool, "function": function}


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    idx = 0
    while idx < len(messages):
        message = messages[idx]
        idx += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        results: dict[object, list[Message]] = {call["id"]: [] for call in calls}
        others: list[Message] = []
        while idx < len(messages) and messages[idx].get("role") == "tool":
            results.get(messages[idx].get("tool_call_id"), others).append(messages[idx])
            idx += 1
        for call in calls:
            yield {**message, "tool_calls": [call]}
            yield from results.pop(call["id"], ())
            message = {"role": message["role"], "content": ""}
        yield from others


def _words_apart(messages: Iterator[Message]) -> Iterator[Message]:
    for message in messages:
        if "tool_calls" in message and message["content"]:
            yield {"role": message["role"], "content": message["content"]}
            yield {**message, "content": ""}
        else:
            yield message


def _words_joined(messages: Iterator[Message]) -> Iterator[Message]:
    words: list[str] = []
    held: list[Message] = []  # calls since the turn began, without their words, and their results
    for message in messages:
        if "tool_calls" in message:
            words += filter(None, [message["content"]])
            held.append({**message, "content": ""})
        elif held and message.get("role") == "tool":
            held.append(message)
        elif words and message.get("role") == "assistant":
            yield from held
            yield {**message, "content": "\n\n".join([*words, message["content"]])}
            words, held = [], []
        else:
            yield from _led_by(words, held)
            yield message
            words, held = [], []
    yield from _led_by(words, held)


def _led_by(words: Sequence[str], messages: Sequence[Message]) -> Iterator[Message]:
    if words:
        yield {"role": "assistant", "content": "\n\n".join(words)}
    yield from messages


def _with_names(messages: Iterator[Message]) -> Iterator[Message]:
    names: dict[object, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message.get("role") == "tool" and "name" not in message:
            yield {**message, "name": names.get(message.get("tool_call_id"), "")}
        else:
            yield message


def _with_short_ids(messages: Iterator[Message]) -> Iterator[Message]:
    short: dict[object, str] = {}

    def of(long: object) -> str:
        return short.setdefault(long, _SHORT_ID.format(len(short)))

    for message in messages:
        if "tool_calls" in message:
            calls = [{**call, "id": of(call["id"])} for call in message["tool_calls"]]
            yield {**message, "tool_calls": calls}
        elif message.get("role") == "tool":
            yield {**message, "tool_call_id": of(message.get("tool_call_id"))}
        else:
            yield message


def fold(messages: Sequence[Message], indices: set[int]) -> list[Message]:
    """The chat with the words of these messages at the front of the next user's; without those that
    no user's message follows."""
    folded: list[Message] = []
    words: list[str] = []
    for idx, message in enumerate(messages):
        if idx in indices:
            words.append(message["content"])
        elif words and message.get("role") == "user":
            joined = "\n\n".join([*words, message["content"]])
            folded.append({**message, "content": joined})
            words = []
        else:
            folded.append(message)
    return folded


def sample_of(messages: Sequence[Message]) -> Sequence[Message]:
    """A short chat that has each kind of message of this one, and each kind after each other that
    it follows: a reading that keeps all of it most likely keeps all of the long one."""
    sample: list[Message] = []
    seen: set[object] = set()
    before: object = None
    is_kept = True
    for message in messages:
        kind = _kind(message)
        if kind[0] != "tool":  # results stay with their calls
            is_kept = (before, kind) not in seen
            seen.add((before, kind))
            before = kind
        if is_kept:
            sample.append(message)
    return sample


def _kind(message: Message) -> tuple[object, ...]:
    arguments = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    return (
        message.get("role"),
        bool(message["content"]),
        min(len(arguments), 2),
        any(isinstance(each, str) for each in arguments),
        any(arguments),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A part of a chat that a template leaves out."""

    idx: int
    #: The name of the call; None: the message's words.
    call: str | None = None
    #: The call is there, its name is not.
    is_name_only: bool = False


@dataclass(slots=True)
class _Part:
    lost: Lost
    marks: list[int] = field(default_factory=list)


class Shadow:
    """A chat of the same shape, with marks for its words, the names of its calls and their
    arguments. Small, however long the texts are.

    Thoughts of earlier answers have no marks: most templates leave them out, and mean to.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._prefix = f"q{secrets.token_hex(4)}v"  # no text can hold it by chance, nor on purpose
        self._num_marks = 0
        self._parts: list[_Part] = []
        self._find: Callable[[str], list[str]] = re.compile(rf"{self._prefix}(\d+)z").findall
        self.messages = [self._shadow(idx, message) for idx, message in enumerate(messages)]

    def lost_in(self, text: str) -> list[Lost]:
        """What a rendered shadow lacks, in the order of the messages."""
        found = set(map(int, self._find(text)))
        return [part.lost for part in self._parts if not found.issuperset(part.marks)]

    def _shadow(self, idx: int, message: Message) -> Message:
        shadow = dict(message)
        if message["content"].strip():
            shadow["content"] = self._mark(self._part(Lost(idx=idx)))
        for key in _REASONING_KEYS:
            if key in shadow:
                shadow[key] = "a thought"
        if "tool_calls" in message:
            shadow["tool_calls"] = [self._call(idx, call) for call in message["tool_calls"]]
        return shadow

    def _call(self, idx: int, call: Mapping[str, Any]) -> Mapping[str, Any]:
        lost = Lost(idx=idx, call=call["function"]["name"])
        arguments = call["function"]["arguments"]
        # A template may leave the name out and say the arguments; that is not the call's loss.
        name = self._mark(self._part(replace(lost, is_name_only=bool(arguments))))
        if arguments:
            part = self._part(lost)
            if isinstance(arguments, str):
                arguments = self._mark(part)
            else:
                values = list(arguments.values())
                arguments = {self._mark(part): self._value(part, value) for value in values}
        function = {**call["function"], "name": name, "arguments": arguments}
        return {**call, "function": function}

    def _value(self, part: _Part, value: object) -> object:
        """A value of the same type. Numbers and truth values stand for themselves: whether one is
        there cannot be seen."""
        if not value or not isinstance(value, str | list | dict):
            return value
        mark = self._mark(part)
        if isinstance(value, list):
            return [mark]
        return {mark: mark} if isinstance(value, dict) else mark

    def _part(self, lost: Lost) -> _Part:
        self._parts.append(_Part(lost))
        return self._parts[-1]

    def _mark(self, part: _Part) -> str:
        part.marks.append(self._num_marks)
        self._num_marks += 1
        return f"{self._prefix}{part.marks[-1]}z"
