"""Warnings that strangers can cause as often as they like, in a bounded number of lines."""

from __future__ import annotations

import asyncio
import logging

__all__ = ["SparseLog"]


class SparseLog:
    """Logs the first of a kind of event at once; of those that follow within the interval, how many
    they were and the last one, at its end. Runs on the event loop.
    """

    def __init__(self, logger: logging.Logger, *, interval_s: float = 10.0) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._num_kept_back = 0
        self._last = ""
        self._timer: asyncio.TimerHandle | None = None

    def warn(self, text: str) -> None:
        """One more."""
        if self._timer is not None:
            self._num_kept_back += 1
            self._last = text
            return
        self._logger.warning("%s", text)
        self._wait()

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
            self._logger.warning(
                "%d more like this in %g s, the last: %s", count, self._interval_s, self._last
            )
