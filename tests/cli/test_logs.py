"""The form of log lines: role and process on each, one object a line where JSON is asked for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

SCRIPT = """
import logging
from pdx.process.logs import set_up_from_environment
set_up_from_environment("decode")
logging.getLogger("pdx.engine").info("hidden unless asked for")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("pdx.engine").exception("two\\nlines %s", "ü")
"""


def logged(**env: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert run.stdout == ""
    return run.stderr.splitlines()


def test_json_lines_carry_role_process_level_and_traceback() -> None:
    [line] = map(json.loads, logged(PDX_LOG_FORMAT="json"))
    assert line["message"] == "two\nlines ü"
    assert "ZeroDivisionError" in line["exception"]
    assert {key: line[key] for key in ("level", "role", "logger")} == {
        "level": "error",
        "role": "decode",
        "logger": "pdx.engine",
    }
    assert isinstance(line["pid"], int)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", line["time"])


def test_text_lines_name_role_and_process_and_obey_the_level() -> None:
    first, *_ = logged(PDX_LOG_LEVEL="info")
    assert re.search(r" I decode\[\d+\] pdx\.engine: hidden unless asked for$", first)
    first, *_ = logged(PDX_LOG_LEVEL="warning")
    assert re.search(r" E decode\[\d+\] pdx\.engine: two$", first)
