"""docs/observing.md and docs/faults.md name all that there is, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pdx.metrics.faults import Fault, fault_counts
from pdx.metrics.node import NodeMetrics
from pdx.metrics.serving import ServingMetrics

DOCS = Path(__file__).parents[2] / "docs"


def names_on(page: bytes) -> set[str]:
    """The metrics of a page, those of processes by their beginning."""
    names = set()
    for family in text_string_to_metric_families(page.decode()):
        assert len(family.documentation) > 10, family.name
        name = family.name + "_total" * (family.type == "counter")
        names.add(re.sub(r"process_\w+", "process_*", name))
    return names


async def test_each_metric_is_in_the_docs_and_the_reverse() -> None:
    counts = fault_counts({}) | {"preemptions": 0}
    serving = ServingMetrics(
        version="1", model="m", counts=lambda: counts, num_streams=lambda: 0
    ).scrape()
    rows = re.findall(
        r"^\| `((?:pdx|process)_[a-z_*]+)` \| (P?)", (DOCS / "observing.md").read_text(), re.M
    )
    assert {name for name, _ in rows} == names_on(serving)
    prefiller = names_on(NodeMetrics(lambda: counts).scrape())
    assert {name for name, mark in rows if mark} == prefiller


def test_each_reason_of_a_fault_is_in_the_docs_and_the_reverse() -> None:
    text = (DOCS / "faults.md").read_text()
    table = text.partition("## What a fault moves")[2].partition("\n## ")[0]
    cells = [cell for row in re.findall(r"^\|.*", table, re.M) for cell in row.split("|")[2:4]]
    named = {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}
    assert named - {"aborted", "timed_out"} == {str(fault) for fault in Fault}


def test_each_test_that_the_table_of_faults_names_is_there() -> None:
    text = (DOCS / "faults.md").read_text()
    tests = "".join(path.read_text() for path in (DOCS.parent / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", text)
    assert len(named) > 30
    assert not [name for name in named if f"def {name}(" not in tests]
