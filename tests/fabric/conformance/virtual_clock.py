"""Virtual time for a test: callbacks in order of their time, run while something is waited for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["VirtualClock"]


class VirtualClock:
    """A clock that stands still unless run_until() or advance() moves it."""

    def __init__(self) -> None:
        self._now_ns = 0
        self._count = 0
        self._due: list[tuple[int, int, Callable[[], None]]] = []

    def now_ns(self) -> int:
        return self._now_ns

    def call_at(self, when_ns: int, callback: Callable[..., None], *args: Any) -> None:
        assert when_ns >= self._now_ns
        self._count += 1
        heapq.heappush(self._due, (when_ns, self._count, partial(callback, *args)))

    def run_until(self, condition: Callable[[], bool], timeout_ns: int) -> bool:
        """Whether the condition came true in time."""
        deadline_ns = self._now_ns + timeout_ns
        while not condition():
            if not self._due or self._due[0][0] > deadline_ns:
                self._now_ns = deadline_ns
                return False
            self._now_ns, _, callback = heapq.heappop(self._due)
            callback()
        return True

    def advance(self, duration_ns: int) -> None:
        self.run_until(lambda: False, duration_ns)
