"""Tables on stdout: Rich's on a terminal, aligned plain text in a pipe or a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Table", "print_tables"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text; without column names, the first column names the rows."""

    title: str
    columns: tuple[str, ...] | None = None
    rows: tuple[tuple[str, ...], ...]
    #: A line below.
    note: str = ""


def print_tables(tables: Iterable[Table]) -> None:
    """Print them, one below the other."""
    if sys.stdout.isatty():
        _print_rich(tables)
        return
    sys.stdout.write("\n".join(_plain(table) for table in tables))


def _plain(table: Table) -> str:
    rows = [*([table.columns] if table.columns else []), *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [table.title, *("  " + _aligned(row, widths, table) for row in rows)]
    if table.note:
        lines.append(f"  ({table.note})")
    return "\n".join(lines) + "\n"


def _aligned(row: Sequence[str], widths: Sequence[int], table: Table) -> str:
    cells = [
        cell.rjust(width) if _is_number_column(table, index) else cell.ljust(width)
        for index, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _is_number_column(table: Table, index: int) -> bool:
    return table.columns is not None and index > 0


def _print_rich(tables: Iterable[Table]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    for table in tables:
        shown = RichTable(
            title=Text(table.title),
            caption=Text(table.note) if table.note else None,
            box=box.SIMPLE,
            show_header=table.columns is not None,
            title_justify="left",
            caption_justify="left",
        )
        for index, name in enumerate(table.columns or [""] * len(table.rows[0])):
            numbers = _is_number_column(table, index)
            shown.add_column(
                name, justify="right" if numbers else "left", style=None if index else "bold"
            )
        for row in table.rows:
            shown.add_row(*map(Text, row))
        console.print(shown)
