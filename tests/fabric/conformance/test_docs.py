"""docs/fabric.md: the tests that it names exist, and its example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
_PAGE = (_ROOT / "docs" / "fabric.md").read_text()


def test_every_guarantee_names_a_test_of_this_suite() -> None:
    suite = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", _PAGE))
    assert len(named) > 30
    assert {name for name in named if f"def {name}(" not in suite} == set()


def test_the_example_runs() -> None:
    example = re.findall(r"```python\n(.*?)```", _PAGE, re.DOTALL)[0]
    subprocess.run([sys.executable, "-c", example], check=True, timeout=60, cwd=_ROOT)
