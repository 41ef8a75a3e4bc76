"""What strangers can cause as often as they like takes a bounded number of lines."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdx.process.sparse_log import SparseLog, sparse_warnings


class Lines(logging.Logger):
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__("lines")
        self.said: list[str] = []
        self._more = asyncio.Event()

    def handle(self, record: logging.LogRecord) -> None:
        assert record.levelno == logging.WARNING
        self.said.append(record.getMessage())
        self._more.set()

    async def wait(self, num_lines: int) -> None:
        while len(self.said) < num_lines:
            self._more.clear()
            await self._more.wait()


async def test_the_first_is_said_at_once_and_the_others_are_counted() -> None:
    lines = Lines()
    log = SparseLog(lines, interval_s=0.02)
    for idx in range(1000):
        log.warn(f"event {idx}")
    assert lines.said == ["event 0"]
    await lines.wait(2)
    assert lines.said[1] == "999 more like this in 0.02 s, the last: event 999"
    log.warn("event 1000")
    assert len(lines.said) == 2, "the interval after a count is quiet too"
    await lines.wait(3)
    assert lines.said[2].startswith("1 more like this")
    log.close()
    assert len(lines.said) == 3


async def test_what_was_kept_back_is_said_at_the_end() -> None:
    lines = Lines()
    log = SparseLog(lines, interval_s=60)
    log.close()
    log.warn("first")
    log.warn("second")
    log.close()
    assert lines.said == ["first", "1 more like this in 60 s, the last: second"]


async def test_warnings_of_other_peoples_loggers_are_sparse_by_their_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strange = logging.getLogger("strange")
    with sparse_warnings("strange", interval_s=60):
        for name in ("a", "b", "c"):
            strange.warning("from %s", name)
        strange.warning("something else")
        for name in ("d", "e"):
            strange.error("from %s", name)
        assert caplog.messages == ["from a", "something else", "from d", "from e"]
    assert caplog.messages[4:] == ["2 more like this in 60 s, the last: from c"]
    strange.warning("from %s", "f")
    assert caplog.messages[5:] == ["from f"], "the filter is gone"
