"""docs/faults.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]


def test_every_fault_names_a_test() -> None:
    page = (_ROOT / "docs" / "faults.md").read_text()
    suite = "".join(path.read_text() for path in (_ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 25
    assert {name for name in named if f"def {name}(" not in suite} == set()
