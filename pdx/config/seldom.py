"""Warnings that anyone on the network can cause, said seldom."""

from __future__ import annotations

import logging
import time

__all__ = ["Seldom"]


class Seldom(logging.Filter):
    """Lets each warning of a logger through once in a while, whatever its arguments: strangers must
    not be able to fill a disk. Other levels are let through."""

    def __init__(self, every_s: float = 60.0) -> None:
        super().__init__()
        self._every_s = every_s
        #: By what is said, when it was said last.
        self._said_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter."""
        if record.levelno != logging.WARNING:
            return True
        now = time.monotonic()
        last = self._said_s.get(record.msg)
        if last is not None and now - last < self._every_s:
            return False
        self._said_s[record.msg] = now
        return True
