"""Finds tool calls in a model's text, whatever form it writes them in.

Owned by whoever serves one output. A call goes out when it is complete, and nothing that follows
takes it back. What begins like a call and is none stays text, and calls are looked for behind its
start tag again. White space in front of a call, and behind the last one, goes to neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, assert_never

from pdx.text.calls.form import CallForm, JsonCall, NamedJson, Parameters, ToolCall
from pdx.text.calls.found import Found, NoCall
from pdx.text.calls.json_bodies import read_json_calls, read_named_json
from pdx.text.calls.parameter_body import read_parameters
from pdx.text.calls.schemas import ToolSchemas
from pdx.text.calls.source import Reading, Source

__all__ = ["CallFinder", "Part"]

#: In the order in which they were written.
Part: TypeAlias = str | ToolCall

_SPACE = re.compile(r"\s*")
#: What was no call is read again behind its start tag. A text that was made for it could so take
#: the square of its length. So no more than these characters are read again, and as often as this
#: the text so far; what is no call then goes out as words, with the calls that it may hold.
_MAX_READS = 8
_FREE_CHARS = 1 << 18
#: What a call without tags begins with.
_OBJECT, _ARRAY = "{", "["


class CallFinder:
    """Finds the calls in one output of a model that was shown these tools."""

    def __init__(self, form: CallForm, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._form = form
        self._schemas = ToolSchemas(tools)
        self._source = Source()
        self._parts: list[Part] = []
        #: White space, and what separates calls: it goes out if words follow.
        self._gap: list[str] = []
        self._has_called = False
        #: Words have come since the start, or since the last call.
        self._has_words = False
        #: End tags that have not come with their calls: when they come they are no words.
        self._owed: frozenset[str] = frozenset()
        self._between = re.compile(rf"[\s{re.escape(form.separators)}]*")
        self._num_read_again = 0
        self._run = self._read()
        next(self._run)

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text and the calls that this piece completes."""
        return _apart(self.push_parts(text))

    def flush(self) -> tuple[str, list[ToolCall]]:
        """What was held back, at the end of the output; models forget the last end tag."""
        return _apart(self.flush_parts())

    def push_parts(self, text: str) -> list[Part]:
        """See `push`."""
        self._source.push(text)
        return self._advance()

    def flush_parts(self) -> list[Part]:
        """See `flush`."""
        self._source.is_ended = True
        return self._advance()

    def _advance(self) -> list[Part]:
        next(self._run, None)
        parts, self._parts = self._parts, []
        return parts

    def _read(self) -> Reading[None]:
        """Read the whole output, leaving what goes out in ``_parts``."""
        source = self._source
        while (yield from source.has_more()):
            source.forget()
            tags = self._tags()
            words = source.take_now(_words_before(tags))
            if words:
                self._say(words)
                continue
            start = source.position
            tag = yield from source.match(tags)
            if tag is None:
                self._say(source.text(start, source.position))
            elif tag in self._owed:
                self._owed -= {tag}
                if not self._has_words:
                    self._gap.clear()
            else:
                yield from self._try_call(tag)
        if self._has_words or not self._has_called:
            self._parts += self._gap

    def _tags(self) -> tuple[str, ...]:
        """What is looked for from here on: starts of calls, and tags that are owed."""
        form = self._form
        tags = {pair.start for pair in (form.section, form.call) if pair is not None}
        if isinstance(form.body, Parameters):
            tags.add(form.body.name_start)
        if form.prefix is not None:
            tags.add(form.prefix)
        # In the middle of words a bare object is a call if it names a tool: there must be some.
        is_bare_here = form.is_bare and (not self._has_words or self._schemas.names)
        # Between the tags of one call models write several.
        has_more_inside = form.call is not None and form.call.end in self._owed
        if is_bare_here:
            tags |= {_OBJECT, _ARRAY}
        elif has_more_inside and not self._has_words and isinstance(form.body, JsonCall):
            tags.add(_OBJECT)
        return (*tags, *self._owed)

    def _try_call(self, tag: str) -> Reading[None]:
        """Read the call that a tag begins; the source stands behind the tag."""
        source = self._source
        start = source.position - len(tag)
        try:
            found = yield from self._read_call(tag)
        except NoCall as no_call:
            end = start + len(tag) if no_call.end is None else no_call.end
            if not self._may_read_again(source.position - end):
                end = source.position
            self._say(source.text(start, end))
            source.rewind(end)
            return
        self._parts += found.calls
        self._gap.clear()
        self._has_called, self._has_words = True, False
        form = self._form
        owed = set() if form.section is None else {form.section.end}
        if form.call is not None and not found.is_closed:
            owed.add(form.call.end)
        self._owed = frozenset(owed)
        start = source.position
        if found.read_to > start and not self._may_read_again(found.read_to - start):
            self._say(source.text(start, found.read_to))
            source.rewind(found.read_to)

    def _may_read_again(self, num_chars: int) -> bool:
        self._num_read_again += num_chars
        return self._num_read_again <= _FREE_CHARS + _MAX_READS * self._source.position

    def _read_call(self, tag: str) -> Reading[Found]:
        form, source = self._form, self._source
        if form.section is not None and tag == form.section.start:
            yield from source.skip(_SPACE)
            tag = self._inner_start()
            if (yield from source.match((tag,))) is None:
                raise NoCall
        if tag in (_OBJECT, _ARRAY):
            source.rewind(source.position - len(tag))
        match form.body:
            case JsonCall():
                found = yield from read_json_calls(form, form.body, source)
            case NamedJson():
                found = yield from read_named_json(form, form.body, source)
            case Parameters():
                found = yield from read_parameters(form, form.body, source, tag, self._schemas)
            case _:
                assert_never(form.body)
        names = self._schemas.names
        if form.is_bare and self._has_words and not all(c.name in names for c in found.calls):
            raise NoCall(source.position)
        return found

    def _inner_start(self) -> str:
        """What begins a call inside a section."""
        form = self._form
        if form.call is not None:
            return form.call.start
        return form.body.name_start if isinstance(form.body, Parameters) else _OBJECT

    def _say(self, text: str) -> None:
        """Let text out, but for white space at its end."""
        if self._has_called and not self._has_words:
            gap = self._between.match(text)
            assert gap is not None
            self._gap.append(gap[0])
            text = text[gap.end() :]
        words = text.rstrip()
        if words:
            self._parts += [*self._gap, words]
            self._gap.clear()
            self._has_words = True
        self._gap.append(text[len(words) :])


@lru_cache
def _words_before(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Characters that begin none of the tags."""
    first = "".join(sorted({re.escape(tag[0]) for tag in tags}))
    return re.compile(f"[^{first}]*" if first else r"[\s\S]*")


def _apart(parts: Sequence[Part]) -> tuple[str, list[ToolCall]]:
    words = "".join(part for part in parts if isinstance(part, str))
    return words, [part for part in parts if isinstance(part, ToolCall)]
