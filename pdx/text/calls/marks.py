"""The tags of a call with `Parameters`, and which of them are tags and which a value's text.

Values are written without quotes, so they may hold any of the tags. What is meant is told by these
rules, in this order:

- A value's end tag counts only if nothing but white space comes between it and the next parameter
  or the function's end. (``a </parameter> b`` is a value.)
- Tags in a value that are balanced, as those of a whole parameter, belong to the value.
- A parameter is given once, and where the schema allows no other parameters, it must be one of
  the schema's; what looks like another one belongs to the value.
- If these cannot all be kept, a value's end tag is taken to be missing where another parameter of
  the schema, or the function's end, begins a line.
- If that does not help, balance goes first, then the schema.

In a call that is written in lines, as templates write it, tags of which something else stands in
front on their line open and close nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

__all__ = ["Mark", "MarkKind", "is_strong", "pairs"]


class MarkKind(enum.Enum):
    """What a tag is."""

    NAME = enum.auto()
    KEY = enum.auto()
    VALUE_END = enum.auto()
    END = enum.auto()
    CALL = enum.auto()
    CALL_END = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One tag. Positions are the source's."""

    kind: MarkKind
    start: int
    end: int
    #: Number of line breaks in front.
    line: int
    #: It begins its line.
    begins_line: bool
    #: Only white space since the mark before.
    is_adjacent: bool
    #: What a KEY or a NAME says.
    key: str = ""


#: A parameter: its KEY and its VALUE_END.
Pair = tuple[Mark, Mark]


def is_strong(marks: Sequence[Mark], idx: int, *, in_lines: bool) -> bool:
    """Whether a tag stands where one is written: at the start of its line, at the end of a line
    that a KEY starts, or right behind a CALL."""
    mark, before = marks[idx], marks[idx - 1]
    if not in_lines or mark.begins_line:
        return True
    if mark.kind is MarkKind.VALUE_END:
        return before.kind is MarkKind.KEY and before.begins_line and before.line == mark.line
    return before.kind is MarkKind.CALL and before.begins_line and mark.is_adjacent


def pairs(
    marks: Sequence[Mark], *, in_lines: bool, known: frozenset[str], allows_others: bool
) -> list[Pair] | None:
    """The parameters of a function whose marks are given, the NAME first and the END last; None:
    they make no function.

    Args:
        marks: All tags, those in values among them.
        in_lines: Keys and values have lines of their own.
        known: The schema's parameters; none where it tells none.
        allows_others: There may be parameters beside the known ones.
    """
    if len(marks) == 2:
        return [] if marks[1].is_adjacent else None
    if marks[1].kind is not MarkKind.KEY or not marks[1].is_adjacent:
        return None

    def fits(key: str, given: Container[str]) -> bool:
        return key not in given and (allows_others or key in known)

    balanced = _balanced(marks, in_lines=in_lines)
    if balanced is not None and _all_fit(balanced, fits):
        return balanced
    mended = _balanced(_mended(marks, known), in_lines=in_lines) if in_lines else None
    if mended is not None and _all_fit(mended, fits):
        return mended
    return _flat(marks, fits) or balanced or _flat(marks, lambda key, given: True)


def _all_fit(found: Sequence[Pair], fits: Callable[[str, Container[str]], bool]) -> bool:
    given: set[str] = set()
    for key, _ in found:
        if not fits(key.key, given):
            return False
        given.add(key.key)
    return True


def _balanced(marks: Sequence[Mark], *, in_lines: bool) -> list[Pair] | None:
    """Parameters whose values have as many KEYs as VALUE_ENDs, in order."""
    found: list[Pair] = []
    key: Mark | None = marks[1]
    depth = 0
    for idx, mark in enumerate(marks[2:-1], 2):
        counts = is_strong(marks, idx, in_lines=in_lines)
        if mark.kind is MarkKind.KEY:
            if key is None:
                key = mark
            else:
                depth += counts
        elif mark.kind is MarkKind.VALUE_END and key is not None and counts:
            if depth:
                depth -= 1
            elif _can_close(marks, idx):
                found.append((key, mark))
                key = None
    return found if key is None else None


def _mended(marks: Sequence[Mark], known: frozenset[str]) -> list[Mark]:
    """The marks with VALUE_ENDs where they are missing."""
    mended = [marks[0], marks[1]]
    given = {marks[1].key}
    is_open = True
    for idx, mark in enumerate(marks[2:], 2):
        is_end = idx + 1 == len(marks)
        is_next = mark.kind is MarkKind.KEY and mark.begins_line and mark.key in known - given
        if is_open and (is_next or is_end):
            end = replace(mark, kind=MarkKind.VALUE_END, end=mark.start, is_adjacent=False, key="")
            mended += [end, replace(mark, is_adjacent=True)]
        else:
            mended.append(mark)
        if mark.kind is MarkKind.KEY:
            given.add(mark.key)
        is_open = mark.kind is MarkKind.KEY or (is_open and mark.kind is not MarkKind.VALUE_END)
    return mended


def _flat(marks: Sequence[Mark], fits: Callable[[str, Container[str]], bool]) -> list[Pair] | None:
    """Parameters that end wherever they can, and go on where the next one would not fit."""
    found: list[Pair] = []
    given = {marks[1].key}
    key: Mark | None = marks[1]
    for idx, mark in enumerate(marks[2:-1], 2):
        if key is None:
            key = mark  # a KEY: the one that the VALUE_END in front has been looked at for
        elif mark.kind is MarkKind.VALUE_END and _can_close(marks, idx):
            following = marks[idx + 1]
            if following.kind is MarkKind.KEY:
                if not fits(following.key, given):
                    continue
                given.add(following.key)
            found.append((key, mark))
            key = None
    return found if key is None else None


def _can_close(marks: Sequence[Mark], idx: int) -> bool:
    following = marks[idx + 1]
    is_last = idx + 2 == len(marks)
    return following.is_adjacent and (is_last or following.kind is MarkKind.KEY)
