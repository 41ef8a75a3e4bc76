"""The form of log lines, the same in all processes of a node: role and process id on each."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

__all__ = ["JsonFormatter", "set_up", "set_up_from_environment"]


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "role": self._role,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
            # What some lines tell in fields too: ``extra={"fields": {...}}``.
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up(role: str, *, level: str, form: str) -> None:
    """Log to stderr from now on.

    Args:
        level: debug, info, warning or error.
        form: text or json.
    """
    line = f"%(asctime)s %(levelname).1s {role}[%(process)d] %(name)s: %(message)s"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role) if form == "json" else logging.Formatter(line))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def set_up_from_environment(role: str) -> None:
    """The same for a process that a command has started."""
    set_up(
        role,
        level=os.environ.get("PDX_LOG_LEVEL", "warning"),
        form=os.environ.get("PDX_LOG_FORMAT", "text"),
    )
