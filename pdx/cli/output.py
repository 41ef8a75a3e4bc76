"""What commands print: data on stdout, everything else on stderr."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from pdx.errors import PdxError

if TYPE_CHECKING:
    from pdx.request.rank import RankLoading

__all__ = ["announce", "loading_progress", "print_error", "set_up_logging", "status_line"]


def print_error(error: PdxError) -> None:
    """`error: ...`, and a hint where there is one; the notes (tracebacks of ranks) only with
    PDX_DEBUG.
    """
    typer.echo(f"error: {error.message}", err=True)
    if error.hint:
        typer.echo(f"\nhint: {error.hint}", err=True)
    if os.environ.get("PDX_DEBUG"):
        for note in getattr(error, "__notes__", []):
            typer.echo(note, err=True)


def announce(line: str) -> None:
    """A line of data on stdout, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def status_line(text: str) -> None:
    """A line about what is going on, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def set_up_logging(level: str) -> None:
    """Log to stderr, one line per record."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        stream=sys.stderr,
    )


@contextmanager
def loading_progress(what: str) -> Iterator[Callable[[RankLoading], None]]:
    """A progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda message: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"loading {what}", total=None)

        def show(message: RankLoading) -> None:
            progress.update(task, completed=message.done_bytes, total=message.total_bytes)

        yield show
