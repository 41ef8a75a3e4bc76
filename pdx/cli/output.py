"""What commands print: data on stdout, everything else on stderr, as text or as lines of JSON."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from pdx.config.logs import JsonFormatter, set_up

if TYPE_CHECKING:
    from pdx.config.node import OutputConfig
    from pdx.request.rank import RankLoading

__all__ = ["announce", "loading_progress", "print_error", "set_up_logging", "status_line"]

#: What a person who watches the node wants to know at any log level.
_status = logging.getLogger("pdx.status")


def print_error(message: str, hint: str | None = None) -> None:
    """`error: ...`, and a hint where there is one."""
    if _is_json():
        _status.error(message if hint is None else f"{message} (hint: {hint})")
        return
    typer.echo(f"error: {message}", err=True)
    if hint:
        typer.echo(f"\nhint: {hint}", err=True)


def announce(line: str) -> None:
    """A line of data on stdout, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def status_line(text: str) -> None:
    """A line about what is going on, on stderr."""
    if _is_json():
        _status.info(text)
        return
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def set_up_logging(role: str, output: OutputConfig) -> None:
    """Log to stderr, one line per record; processes that this one starts do the same."""
    os.environ["PDX_LOG_LEVEL"] = output.log_level
    os.environ["PDX_LOG_FORMAT"] = output.log_format
    set_up(role, level=output.log_level, form=output.log_format)
    _status.setLevel(logging.INFO)


def _is_json() -> bool:
    return any(isinstance(each.formatter, JsonFormatter) for each in logging.root.handlers)


@contextmanager
def loading_progress(what: str) -> Iterator[Callable[[RankLoading], None]]:
    """A progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty() or _is_json():
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
