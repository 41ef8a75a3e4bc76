"""A pdx command on a pseudo-terminal of 80 columns and 24 lines."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ENV", "Terminal", "terminal"]

ENV = {"COLUMNS": "80", "LINES": "24", "TERM": "xterm", "NO_COLOR": "1"}
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """What a command shows, and what is typed."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self._fd = fd
        self._seen = ""
        self._place = 0

    def expect(self, text: str) -> str:
        """Wait for text after what was expected before; returns what came with it."""
        deadline = time.monotonic() + 20
        while (at := self._seen.find(text, self._place)) < 0:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._fd], [], [], max(left, 0))
            assert ready, f"no {text!r} in {self._seen[self._place :]!r}"
            self._read()
        before, self._place = self._seen[self._place : at], at + len(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 4096)
        except OSError as error:  # the other side is closed
            raise AssertionError(f"the command ended: {self._seen!r}") from error
        self._seen += _CONTROL.sub("", data.decode(errors="replace"))


@contextmanager
def terminal(*arguments: str, **env: str) -> Iterator[Terminal]:
    """Run `pdx ARGUMENTS`; killed at the end if it still runs."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pdx", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | ENV | env,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
