"""Tables on stdout: Rich's on a terminal, aligned plain text in a pipe or a file.

A table is as wide as its text where nobody says how wide it may be (a pipe, a file), and no wider
than the terminal, or COLUMNS, elsewhere: texts go on in the next line, between words, and columns
that have no room left come in a table of their own below.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

__all__ = ["Table", "print_tables"]

_INDENT = "  "
_GAP = 2
#: A column of texts has at least this width, if its texts are not narrower.
_MIN_TEXT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text; without column names, the first column names the rows."""

    title: str
    columns: tuple[str, ...] | None = None
    rows: tuple[tuple[str, ...], ...]
    #: A line below.
    note: str = ""
    #: Columns of texts beside the first, by their place; the others of a table with column names
    #: hold numbers.
    texts: tuple[int, ...] = ()

    def holds_texts(self, index: int) -> bool:
        """Whether a column may go on in the next line."""
        return self.columns is None or index == 0 or index in self.texts


def _room() -> int | None:
    """How wide a table may be; None: as it likes."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return None


def print_tables(tables: Iterable[Table]) -> None:
    """Print them, one below the other."""
    room = _room()
    shown = [part for table in tables for part in _parts(table, room)]
    if sys.stdout.isatty():
        _print_rich(shown)
        return
    sys.stdout.write("\n".join(_plain(table, room) for table in shown))


def _fitted(table: Table, room: int) -> list[int]:
    """The columns' widths in so many characters; numbers are never broken, texts where they must
    be.
    """
    cells = [*([table.columns] if table.columns else []), *table.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    texts = sorted((i for i in range(len(widths)) if table.holds_texts(i)), key=lambda i: widths[i])
    # What is there for the texts, which share it alike; a short one leaves its rest to the others.
    left = room - _GAP * (len(widths) - 1) - sum(w for i, w in enumerate(widths) if i not in texts)
    for num_done, index in enumerate(texts):
        share = max(left // (len(texts) - num_done), min(widths[index], _MIN_TEXT))
        widths[index] = min(widths[index], share)
        left -= widths[index]
    return widths


def _parts(table: Table, room: int | None) -> Iterator[Table]:
    """The table, or some that have its first column and as many of the others as have room."""
    num_columns = len(table.rows[0]) if table.rows else 0
    if room is None or num_columns <= 2:
        yield table
        return
    start = 1
    while start < num_columns:
        end = num_columns
        while end > start + 1 and _needs(_picked(table, start, end)) > room:
            end -= 1
        part = _picked(table, start, end)
        is_first, is_last = start == 1, end == num_columns
        yield replace(
            part, title=table.title if is_first else "", note=table.note if is_last else ""
        )
        start = end


def _needs(table: Table) -> int:
    """The least width of a table."""
    widths = _fitted(table, 0)
    return len(_INDENT) + sum(widths) + _GAP * (len(widths) - 1)


def _picked(table: Table, start: int, end: int) -> Table:
    """The first column, and those from ``start`` to ``end``."""

    def pick(row: tuple[str, ...]) -> tuple[str, ...]:
        return (row[0], *row[start:end])

    return replace(
        table,
        columns=None if table.columns is None else pick(table.columns),
        rows=tuple(map(pick, table.rows)),
        texts=tuple(i - start + 1 for i in table.texts if start <= i < end),
    )


def _plain(table: Table, room: int | None) -> str:
    far = sys.maxsize if room is None else max(room - len(_INDENT), 1)
    rows = [*([table.columns] if table.columns else []), *table.rows]
    widths = _fitted(table, far)
    lines = [table.title] if table.title else []
    for row in rows:
        lines += [_INDENT + line for line in _aligned(row, widths, table)]
    if table.note:
        note = f"({table.note})"
        lines += [_INDENT + line for line in (_wrapped(note, far) if room else [note])]
    return "\n".join(lines) + "\n"


def _aligned(row: Sequence[str], widths: Sequence[int], table: Table) -> Iterator[str]:
    """The lines of a row."""
    wrapped = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    for number in range(max(map(len, wrapped))):
        cells = [lines[number] if number < len(lines) else "" for lines in wrapped]
        yield (
            (" " * _GAP)
            .join(
                cell.ljust(width) if table.holds_texts(index) else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            .rstrip()
        )


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of a text, broken between words; a longer word than a line is broken too."""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def _print_rich(tables: Iterable[Table]) -> None:
    from rich import box
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    for table in tables:
        widths = _fitted(table, console.width - len(_INDENT))
        shown = RichTable(
            title=Text(table.title) if table.title else None,
            caption=Text(table.note) if table.note else None,
            box=box.SIMPLE,
            show_edge=False,
            pad_edge=False,
            padding=(0, _GAP - 1, 0, 0),  # and the column's own border, which is a space
            show_header=table.columns is not None,
            title_justify="left",
            caption_justify="left",
        )
        for index, name in enumerate(table.columns or [""] * len(widths)):
            shown.add_column(
                name,
                justify="left" if table.holds_texts(index) else "right",
                style=None if index else "bold",
                width=widths[index],
                overflow="fold",
            )
        for row in table.rows:
            shown.add_row(*map(Text, row))
        console.print(Padding(shown, (0, 0, 1, len(_INDENT)), expand=False))
