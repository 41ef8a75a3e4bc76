"""What commands print: data on stdout, everything else on stderr, as text or as lines of JSON."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

import typer

from pdx.process.logs import JsonFormatter, set_up

if TYPE_CHECKING:
    from pdx.config.node import OutputConfig

__all__ = [
    "announce",
    "is_json",
    "node_line",
    "print_error",
    "set_up_logging",
    "status_line",
]

#: What a person who watches the node wants to know at any log level.
_status = logging.getLogger("pdx.status")
#: ANSI colours of the nodes' names.
_COLOURS = {"prefill": 6, "decode": 5}


def print_error(message: str, hint: str | None = None) -> None:
    """`error: ...`, and a hint where there is one."""
    if is_json():
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
    if is_json():
        _status.info(text)
        return
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def node_line(name: str, line: str) -> None:
    """What a node of ours has written, on stderr under its name. Lines of JSON name their role."""
    if not is_json():
        prefix = f"[{name}]"
        if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
            prefix = f"\x1b[3{_COLOURS[name.partition('-')[0]]}m{prefix}\x1b[0m"
        status_line(f"{prefix} {line}")
    elif line.startswith("{"):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    else:
        _status.info("%s: %s", name, line)


def set_up_logging(role: str, output: OutputConfig) -> None:
    """Log to stderr, one line per record; processes that this one starts do the same."""
    os.environ["PDX_LOG_LEVEL"] = output.log_level
    os.environ["PDX_LOG_FORMAT"] = output.log_format
    set_up(role, level=output.log_level, form=output.log_format)
    _status.setLevel(logging.INFO)


def is_json() -> bool:
    """Whether stderr gets lines of JSON."""
    return any(isinstance(each.formatter, JsonFormatter) for each in logging.root.handlers)
