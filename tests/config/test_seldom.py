from __future__ import annotations

import logging

import pytest

from pdx.config.seldom import Seldom


def record(level: int, message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("x", level, "x.py", 1, message, args, None)


def test_a_warning_is_said_once_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    seldom = Seldom(60.0)
    assert seldom.filter(record(logging.WARNING, "from %s", "a"))
    assert not seldom.filter(record(logging.WARNING, "from %s", "b"))
    assert seldom.filter(record(logging.WARNING, "something else"))
    assert seldom.filter(record(logging.ERROR, "from %s", "a"))
    assert seldom.filter(record(logging.ERROR, "from %s", "a"))
    now = 160.0
    assert seldom.filter(record(logging.WARNING, "from %s", "c"))
