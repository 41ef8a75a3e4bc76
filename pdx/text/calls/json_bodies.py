"""Reads calls whose arguments are JSON: a `JsonCall` or a `NamedJson`.

Arguments go to the client as the model wrote them, so that no digit and no escape changes. Where
the end of a call stands in the place of closing brackets, it closes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pdx.text.calls.form import CallForm, JsonCall, NamedJson, ToolCall
from pdx.text.calls.found import MAX_NAME_CHARS, Found, NoCall
from pdx.text.calls.json_text import (
    NotJson,
    elements,
    members,
    pass_json,
    proper_json,
    with_proper_escapes,
)
from pdx.text.calls.source import Reading, Source

__all__ = ["read_json_calls", "read_named_json"]

_SPACE = re.compile(r"\s*")
#: Models close more brackets than they have opened.
_BRACKETS = re.compile(r"[\s\]}]*")
_NAME = re.compile(r"[^<\n`]*")
#: Behind a fence.
_LANGUAGE = re.compile(r"[A-Za-z]*")


def read_json_calls(form: CallForm, body: JsonCall, source: Source) -> Reading[Found]:
    """One object, or an array of them. The source stands behind the start tag, if there is one."""
    text = yield from _read_value(source, () if form.call is None else (form.call.end,))
    try:
        objects = elements(text) if text.startswith("[") else [text]
        calls = [_call_of_object(body, each, needs_arguments=form.is_bare) for each in objects]
    except (ValueError, RecursionError):
        raise NoCall(source.position) from None
    found = [call for call in calls if call is not None]
    if not found or len(found) < len(calls):
        raise NoCall(source.position)
    return (yield from _read_end(form, source, found))


def read_named_json(form: CallForm, body: NamedJson, source: Source) -> Reading[Found]:
    """The source stands behind the call's start tag."""
    name = yield from source.take(_NAME)
    if (yield from source.match((body.separator,))) is None:
        raise NoCall
    yield from source.skip(_SPACE)
    if (yield from source.peek()) not in ("{", body.fence[0]):
        name = yield from source.take(_NAME)  # what has been read was the kind of the tool
        yield from source.skip(_SPACE)
    is_fenced = (yield from source.peek()) == body.fence[0]
    if is_fenced:
        if (yield from source.match((body.fence,))) is None:
            raise NoCall
        yield from source.skip(_LANGUAGE)
    ends = (body.fence,) if form.call is None else (body.fence, form.call.end)
    text = yield from _read_value(source, ends)
    try:
        call = _call(name, text)
    except (ValueError, RecursionError):
        call = None
    if call is None:
        raise NoCall(source.position)
    if is_fenced:
        yield from _pass_if_there(source, _SPACE, body.fence)
    return (yield from _read_end(form, source, [call]))


def _read_value(source: Source, ends: Sequence[str]) -> Reading[str]:
    """An object or an array, with the closing brackets that one of ``ends`` stands for."""
    yield from source.skip(_SPACE)
    start = source.position
    if (yield from source.peek()) not in ("{", "["):
        raise NoCall
    try:
        yield from pass_json(source)
    except NotJson as error:
        end = source.position
        if not error.missing or (yield from source.match(ends)) is None:
            raise NoCall from None
        source.rewind(end)
        return with_proper_escapes(source.text(start, end) + error.missing)
    return with_proper_escapes(source.text(start, source.position))


def _read_end(form: CallForm, source: Source, calls: list[ToolCall]) -> Reading[Found]:
    """The call is complete: a missing end tag, or what stands in its place, changes nothing."""
    if form.call is None:
        return Found(calls=calls, is_closed=True)
    is_closed = yield from _pass_if_there(source, _BRACKETS, form.call.end)
    return Found(calls=calls, is_closed=is_closed)


def _pass_if_there(source: Source, gap: re.Pattern[str], word: str) -> Reading[bool]:
    """Read a word and the gap in front of it, or nothing."""
    start = source.position
    yield from source.skip(gap)
    is_there = (yield from source.match((word,))) is not None
    if not is_there:
        source.rewind(start)
    return is_there


def _call_of_object(body: JsonCall, text: str, *, needs_arguments: bool) -> ToolCall | None:
    found = members(text)
    if found is None:
        return None
    function = found.get("function", "")
    if body.name_key not in found:  # as OpenAI's clients write calls, or nearly so
        if function.startswith("{"):
            return _call_of_object(body, function, needs_arguments=needs_arguments)
        found[body.name_key] = function or "null"
    keys = [key for key in body.arguments_keys if key in found]
    if needs_arguments and not keys:
        return None  # some other object that has a name
    name = json.loads(found[body.name_key], strict=False)
    return _call(name, found[keys[0]] if keys else "null")


def _call(name: object, arguments: str) -> ToolCall | None:
    """``arguments``: JSON of an object, or of a string that holds one; null, or what is empty, for
    none."""
    name = name.strip() if isinstance(name, str) else ""
    if not 0 < len(name) <= MAX_NAME_CHARS or not _is_text(name):
        return None
    if arguments.startswith('"'):
        arguments = json.loads(arguments, strict=False).strip()
    if arguments in ("", "null", "[]"):
        arguments = "{}"
    return ToolCall(name=name, arguments=proper_json(arguments)) if arguments[:1] == "{" else None


def _is_text(name: str) -> bool:
    """No half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in name)
