"""Warnings that strangers can cause as often as they like, in a bounded number of lines.

Runs on a process's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["SparseLog", "sparse_warnings"]

_MORE = "%d more like this in %g s, the last: %s"


class SparseLog:
    """Logs the first of a kind of event at once; of those that follow within the interval, how many
    they were and the last one, at its end.
    """

    def __init__(self, logger: logging.Logger, *, interval_s: float = 10.0) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._num_kept_back = 0
        self._last = ""
        self._timer: asyncio.TimerHandle | None = None

    def warn(self, text: str) -> None:
        """One more."""
        if self.is_due(text):
            self._logger.warning("%s", text)

    def is_due(self, text: str) -> bool:
        """Whether the caller is to log one more now; else it is counted."""
        if self._timer is None:
            self._wait()
            return True
        self._num_kept_back += 1
        self._last = text
        return False

    def close(self) -> None:
        """Say what was kept back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._say()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        if self._num_kept_back:
            self._say()
            self._wait()

    def _say(self) -> None:
        if self._num_kept_back:
            count, self._num_kept_back = self._num_kept_back, 0
            self._logger.warning(_MORE, count, self._interval_s, self._last)


@contextmanager
def sparse_warnings(*names: str, interval_s: float = 60.0) -> Iterator[None]:
    """Make the warnings of these loggers sparse while the block runs, each by itself. Those whose
    texts differ in their arguments only are one kind. For loggers that others write to: our own
    code calls a :class:`SparseLog`.
    """
    filters = {name: _SparseFilter(logging.getLogger(name), interval_s) for name in names}
    for name, each in filters.items():
        logging.getLogger(name).addFilter(each)
    try:
        yield
    finally:
        for name, each in filters.items():
            each.close()
            logging.getLogger(name).removeFilter(each)


class _SparseFilter(logging.Filter):
    def __init__(self, logger: logging.Logger, interval_s: float) -> None:
        super().__init__()
        self._logger = logger
        self._interval_s = interval_s
        self._logs: dict[str, SparseLog] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter."""
        if record.levelno != logging.WARNING or record.msg == _MORE:
            return True
        log = self._logs.get(record.msg)
        if log is None:
            log = self._logs[record.msg] = SparseLog(self._logger, interval_s=self._interval_s)
        return log.is_due(record.getMessage())

    def close(self) -> None:
        """Say what was kept back."""
        for log in self._logs.values():
            log.close()
