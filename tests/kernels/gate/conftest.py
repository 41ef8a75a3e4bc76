"""The compile gate's options, and the writing of its results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.gate.comparison import Comparison, summary

_RESULTS = Path(__file__).parents[3] / "pdx" / "kernels" / "compiled.json"


#: Launches that were compiled with another Triton than the records': told, not asserted.
OTHER_TRITON = pytest.StashKey[list[Comparison]]()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    compared = config.stash.get(OTHER_TRITON, [])
    if compared:
        import triton

        from tests.kernels.gate.test_gate import RECORDED_WITH

        terminalreporter.section("beside the records")
        for line in summary(compared, triton.__version__, f"{RECORDED_WITH}x"):
            terminalreporter.write_line(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--everything", action="store_true", help="compile unchanged kernels too")
    parser.addoption("--write", action="store_true", help="record the results")


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What this run has found; with --write it takes the place of the same records."""
    found: dict[str, Any] = {}
    yield found
    if request.config.getoption("--write"):
        from tests.kernels.gate.test_gate import LAUNCHES, _label

        old = json.loads(_RESULTS.read_text("utf-8")) if _RESULTS.exists() else {}
        labels = {_label(launch) for launch, _ in LAUNCHES}
        kept = {name: record for name, record in (old | found).items() if name in labels}
        lines = [f"  {json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept)]
        _RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
