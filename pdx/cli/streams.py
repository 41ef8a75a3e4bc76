"""stdout and stderr of a command. What cannot be written to stdout ends the command, with a word
about why; what cannot be written to stderr is lost, since nobody is left to be told.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

from pdx.errors import OutputError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ReaderGone", "open_streams"]


class ReaderGone(Exception):
    """Whoever read our stdout has had enough. No OSError: libraries would make something else of
    it.
    """


class _Stdout(io.FileIO):
    """Raises :class:`OutputError`, which says what failed, instead of OSError. What comes after
    that is thrown away, so that it fails once.
    """

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _drop_stdout()
            raise ReaderGone from None
        except OSError as error:
            _drop_stdout()
            is_closed = error.errno == errno.EBADF
            why = "it is closed" if is_closed else error.strerror
            raise OutputError(f"cannot write to stdout: {why}") from error


class _Stderr(io.FileIO):
    """Takes everything, whatever becomes of it."""

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def open_streams() -> None:
    """Replace Python's standard streams, unless somebody has replaced them already."""
    # Descriptors that we were started without would be given to the next files that are opened.
    # Writing to stdout must fail then.
    for fd, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for as long as the process lives
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Stdout(1, "w", closefd=False), sys.__stdout__)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Stderr(2, "w", closefd=False), sys.__stderr__, by_line=True)


def _drop_stdout() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _text(raw: io.FileIO, like: TextIO | None, *, by_line: bool = False) -> io.TextIOWrapper:
    if isinstance(like, io.TextIOWrapper):
        by_line |= like.line_buffering or like.write_through
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if like is None else like.encoding,
        errors="backslashreplace" if like is None else like.errors,
        line_buffering=by_line,
    )
