"""Reads one JSON value out of a text that goes on behind it, character by character.

What JSON forbids and models write is let through: line breaks and tabs inside strings, and escapes
that there are none of (``"\\d+"``).
"""

from __future__ import annotations

import json
import re

from pdx.text.calls.source import Reading, Source

__all__ = [
    "NotJson",
    "elements",
    "members",
    "pass_json",
    "proper_json",
    "with_proper_escapes",
]

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_CLOSER = {"{": "}", "[": "]"}
#: JSON can spell half of a surrogate pair; UTF-8 cannot.
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPE = re.compile(r"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4}|(?P<quote>')|)")


class NotJson(Exception):
    """What has been read begins no JSON value. ``missing``: brackets with which it would be one."""

    def __init__(self, missing: str = "") -> None:
        super().__init__()
        self.missing = missing


def pass_json(source: Source) -> Reading[None]:
    """Read one value; the source then stands right behind it.

    Raises:
        NotJson: the source stands at the character that cannot be.
    """
    closers: list[str] = []
    while True:
        yield from source.skip(_SPACE)
        char = yield from source.peek()
        if char in _CLOSER:
            source.pass_char()
            if not (yield from _pass_closer(source, _CLOSER[char])):
                closers.append(_CLOSER[char])
                yield from _pass_key(source, closers[-1])
                continue
        elif char == '"':
            yield from _pass_string(source)
        elif not _SCALAR.fullmatch((yield from source.take(_WORD))):
            raise NotJson
        while closers and (yield from _pass_closer(source, closers[-1])):
            closers.pop()
        if not closers:
            return
        if (yield from source.peek()) != ",":
            raise NotJson("".join(reversed(closers)))
        source.pass_char()
        yield from _pass_key(source, closers[-1])


def _pass_closer(source: Source, closer: str) -> Reading[bool]:
    yield from source.skip(_SPACE)
    is_there = (yield from source.peek()) == closer
    if is_there:
        source.pass_char()
    return is_there


def _pass_key(source: Source, closer: str) -> Reading[None]:
    """A member of an object begins with its key."""
    if closer == "}":
        yield from source.skip(_SPACE)
        yield from _pass_string(source)
        yield from source.skip(_SPACE)
        yield from _pass_one_of(source, ":")


def _pass_string(source: Source) -> Reading[None]:
    yield from _pass_one_of(source, '"')
    while True:
        yield from source.skip(_PLAIN)
        if (yield from _pass_one_of(source, '"\\')) == '"':
            return
        if not (yield from source.peek()):
            raise NotJson
        source.pass_char()


def _pass_one_of(source: Source, chars: str | frozenset[str]) -> Reading[str]:
    char = yield from source.peek()
    if not char or char not in chars:
        raise NotJson
    source.pass_char()
    return char


#: Numbers are never looked into, and may be longer than Python converts.
_decode = json.JSONDecoder(strict=False, parse_int=str, parse_float=str).raw_decode


def members(text: str) -> dict[str, str] | None:
    """The members of an object, each as it is written; None: the text is another value.

    Raises:
        RecursionError: it is nested too deeply.
    """
    found: dict[str, str] = {}
    if not text.startswith("{"):
        return None
    at = _past_space(text, 1)
    while text[at] != "}":
        key, at = _decode(text, at)
        start = _past_space(text, _past_space(text, at) + 1)
        _, at = _decode(text, start)
        found[key] = text[start:at]
        at = _past_space(text, at)
        if text[at] == ",":
            at = _past_space(text, at + 1)
    return found


def elements(text: str) -> list[str]:
    """The elements of an array, each as it is written."""
    found: list[str] = []
    at = _past_space(text, 1)
    while text[at] != "]":
        start = at
        _, at = _decode(text, start)
        found.append(text[start:at])
        at = _past_space(text, at)
        if text[at] == ",":
            at = _past_space(text, at + 1)
    return found


def with_proper_escapes(text: str) -> str:
    """The same value, without escapes that JSON does not have: their backslash stands for itself,
    as in a path or a pattern, but for that of ``\\'``."""
    return _ESCAPE.sub(_proper_escape, text)


def _proper_escape(found: re.Match[str]) -> str:
    if found["quote"]:
        return "'"
    return found[0] if len(found[0]) > 1 else "\\\\"


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def proper_json(text: str) -> str:
    """JSON that any parser takes: the text as it is, where it is that.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested too deeply.
    """
    text = with_proper_escapes(text)
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except json.JSONDecodeError:  # line breaks inside strings
        text = json.dumps(json.loads(text, strict=False, parse_constant=_refuse))
    return _LONE_SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _refuse(word: str) -> None:
    """NaN and the infinities, which only Python takes for JSON."""
    raise ValueError(f"{word} is no JSON")
