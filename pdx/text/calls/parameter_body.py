"""Reads a call whose arguments stand between tags: `Parameters`.

The function's end is found as the text comes: it is the tag right behind a value's end (or behind
the name), unless it closes a function that a value quotes. The call's end tag should follow. Where
it does not, the function has ended all the same if another call begins or the answer ends; until
then the text could still be a value's. Models also leave out an end tag inside: if the answer ends
and the function has not, it has at the call's end tag, if another call or nothing follows that.
Which of the tags inside belong to values is told at the end (`marks.py`).
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from pdx.text.calls.form import CallForm, Parameters, ToolCall
from pdx.text.calls.found import MAX_NAME_CHARS, Found, NoCall
from pdx.text.calls.marks import Mark, MarkKind, is_strong, pairs
from pdx.text.calls.schemas import ToolSchemas
from pdx.text.calls.source import Reading, Source

__all__ = ["read_parameters"]

_SPACE = re.compile(r"\s*")
_STARTS = (MarkKind.CALL, MarkKind.NAME)


def read_parameters(
    form: CallForm, body: Parameters, source: Source, start: str, schemas: ToolSchemas
) -> Reading[Found]:
    """The source stands behind ``start``: the call's start tag, or the function's where the model
    has left out the call's."""
    function = _Function(form, body, source)
    name = yield from function.read_start(start)
    marks, is_closed = yield from function.read_to_end()
    schema = schemas.of(name)
    found = pairs(
        marks,
        in_lines=function.in_lines,
        known=schema.names,
        allows_others=schema.allows_others,
    )
    if found is None:
        raise NoCall
    # Where a parameter is given twice, the last value counts, as in JSON.
    arguments = {
        key.key: schema.typed(key.key, _value(source.text(key.end, value_end.start)))
        for key, value_end in found
    }
    joined = ", ".join(
        f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items()
    )
    call = ToolCall(name=name, arguments=f"{{{joined}}}")
    return Found(calls=[call], is_closed=is_closed, read_to=function.read_to)


def _value(text: str) -> str:
    """Without the line breaks that belong to the tags."""
    line_break = "\r\n" if text.startswith("\r\n") else "\n"
    return text.removeprefix(line_break).removesuffix(line_break)


class _Balance:
    """Which value's end closes a parameter of the function, as far as its values are balanced."""

    def __init__(self) -> None:
        #: The last mark may be a parameter's end.
        self.has_closed = True  # before the first one, too
        #: Quoted parameters that are open.
        self._depth = 0

    def add(self, mark: Mark, *, counts: bool) -> None:
        """The next mark. ``counts``: it is written as one is."""
        had_closed, self.has_closed = self.has_closed, False
        if mark.kind is MarkKind.KEY and not (had_closed and mark.is_adjacent):
            self._depth += counts
        elif mark.kind is MarkKind.VALUE_END and counts:
            self.has_closed = self._depth == 0
            self._depth -= self._depth > 0


class _Function:
    """The marks of one function, as they are read."""

    def __init__(self, form: CallForm, body: Parameters, source: Source) -> None:
        self._body = body
        self._source = source
        self._kinds = {
            body.name_start: MarkKind.NAME,
            body.key_start: MarkKind.KEY,
            body.value_end: MarkKind.VALUE_END,
            body.end: MarkKind.END,
        }
        outer = form.call or form.section
        if outer is not None:
            self._kinds |= {outer.start: MarkKind.CALL, outer.end: MarkKind.CALL_END}
        first_chars = "".join({re.escape(tag[0]) for tag in self._kinds})
        self._words = re.compile(f"[^{first_chars}]*")
        self._labels = {
            end: re.compile(f"[^<\n{re.escape(end[0])}]*") for end in (body.name_end, body.key_end)
        }
        self._marks: list[Mark] = []
        self._line = 0
        #: Keys and values have lines of their own, as the first key has.
        self.in_lines = False
        #: Where reading had got to, if it went far behind the end to find it.
        self.read_to = 0

    def read_start(self, start: str) -> Reading[str]:
        """Read up to the name, and see that a parameter or the end follows."""
        source, body = self._source, self._body
        if start != body.name_start:
            yield from source.skip(_SPACE)
            if (yield from source.match((body.name_start,))) is None:
                raise NoCall
        at = source.position
        name = yield from self._read_label(body.name_end)
        if name is None:
            raise NoCall
        end = source.position
        mark = Mark(
            kind=MarkKind.NAME,
            start=at,
            end=end,
            line=0,
            begins_line=True,
            is_adjacent=True,
            key=name,
        )
        self._marks.append(mark)
        yield from source.skip(_SPACE)
        if (yield from source.match((body.key_start, body.end))) is None:
            raise NoCall
        source.rewind(end)
        return name

    def read_to_end(self) -> Reading[tuple[list[Mark], bool]]:
        """The marks up to the function's END, and whether the call's end tag has been read.

        Raises:
            NoCall: the answer ends inside the function.
        """
        #: Number of quoted functions that are open; the last mark has opened one.
        depth, opens_function = 0, False
        #: ENDs of this function that no end tag of the call has followed.
        unclosed: list[int] = []
        #: ENDs that are not written as one is, and are it only if there is no other.
        odd: list[int] = []
        balance = _Balance()
        while (mark := (yield from self._read_mark())) is not None:
            idx = len(self._marks) - 1
            is_strong_mark = is_strong(self._marks, idx, in_lines=self.in_lines)
            if opens_function and not self._is_inside(mark):
                depth -= 1  # the name stands for itself
            opens_function = mark.kind is MarkKind.NAME and is_strong_mark
            closes = balance.has_closed and mark.is_adjacent
            balance.add(mark, counts=is_strong_mark)
            if mark.kind is MarkKind.END and self._can_end(idx):
                if closes:
                    unclosed.append(idx)
                    depth = 0
                elif depth:
                    depth -= 1
                else:
                    odd.append(idx)
            elif mark.kind is MarkKind.CALL_END and mark.is_adjacent:
                if unclosed[-1:] == [idx - 1]:
                    if not (yield from self._goes_on_behind(mark)):
                        return self._marks[:idx], True
                    odd.append(unclosed.pop())
            elif mark.kind in _STARTS and unclosed:
                break
            depth += opens_function
        if not (unclosed or odd):
            return self._end_at_call_end(), True
        end = (unclosed or odd)[0]
        self._source.rewind(self._marks[end].end)
        return self._marks[: end + 1], False

    def _end_at_call_end(self) -> list[Mark]:
        """The marks up to the call's end tag, which stands in the place of the function's END or
        follows one that no value's end is in front of."""
        source = self._source
        self.read_to = source.position
        written = [m for m in self._marks[1:] if m.begins_line or not self.in_lines]
        outer = [m for m in written if m.kind in (*_STARTS, MarkKind.CALL_END)]
        if not outer or outer[0].kind is not MarkKind.CALL_END:
            raise NoCall
        idx = self._marks.index(outer[0])
        mark = outer[0]
        has_next = any(m.kind in _STARTS for m in self._marks[idx + 1 : idx + 2])
        if not has_next and source.text(mark.end, self.read_to).strip():
            raise NoCall
        source.rewind(mark.end)
        if self._marks[idx - 1].kind is MarkKind.END and mark.is_adjacent:
            return self._marks[:idx]
        return [*self._marks[:idx], replace(mark, kind=MarkKind.END)]

    def _is_inside(self, mark: Mark) -> bool:
        """Whether a mark follows a function's name as in a function."""
        return mark.is_adjacent and mark.kind in (MarkKind.KEY, MarkKind.END)

    def _can_end(self, idx: int) -> bool:
        """Whether an END stands right behind a value's end, or a name."""
        before = self._marks[idx - 1]
        is_behind = before.kind in (MarkKind.VALUE_END, MarkKind.NAME)
        return is_behind and self._marks[idx].is_adjacent

    def _goes_on_behind(self, mark: Mark) -> Reading[bool]:
        """Whether a tag follows that only a function has inside; it stays unread."""
        source, body = self._source, self._body
        yield from source.skip(_SPACE)
        tag = yield from source.match((body.key_start, body.value_end, body.end))
        source.rewind(mark.end)
        return tag is not None

    def _read_mark(self) -> Reading[Mark | None]:
        """The next mark; None at the end of the answer."""
        source = self._source
        is_adjacent, begins_line = True, False
        while True:
            words = yield from source.take(self._words)
            if words:
                self._line += words.count("\n")
                begins_line = words.endswith("\n")
                is_adjacent = is_adjacent and words.isspace()
            at = source.position
            if not (yield from source.peek()):
                return None
            tag = yield from source.match(tuple(self._kinds))
            if tag is not None:
                key: str | None = ""
                if tag == self._body.key_start:
                    key = yield from self._read_label(self._body.key_end)
                elif tag == self._body.name_start:
                    key = yield from self._read_label(self._body.name_end)
                if key is not None:
                    break
            is_adjacent, begins_line = False, False
        if self._kinds[tag] is MarkKind.KEY and len(self._marks) == 1:
            self.in_lines = (yield from source.peek()) in ("\n", "\r")
        mark = Mark(
            kind=self._kinds[tag],
            start=at,
            end=source.position,
            line=self._line,
            begins_line=begins_line,
            is_adjacent=is_adjacent,
            key=key,
        )
        self._marks.append(mark)
        return mark

    def _read_label(self, end: str) -> Reading[str | None]:
        """A name or a key up to what ends it; None: it is none."""
        label = (yield from self._source.take(self._labels[end])).strip()
        is_ended = (yield from self._source.match((end,))) is not None
        return label if is_ended and 0 < len(label) <= MAX_NAME_CHARS else None
