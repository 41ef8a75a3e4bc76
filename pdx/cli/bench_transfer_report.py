"""What `pdx bench transfer` prints: tables, or one JSON object."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pdx.cli.tables import Table, print_tables
from pdx.lab.transfers.figures import MIN_CONFIDENT

if TYPE_CHECKING:
    from pdx.lab.transfers.figures import Figure, Interval
    from pdx.lab.transfers.run import Plan

__all__ = ["print_json", "print_text"]

#: p50 and p99 in microseconds, by page size.
Latency = Mapping[int, tuple[float, float]]


def print_json(plan: Plan, provider: str, figures: Sequence[Figure], latency: Latency) -> None:
    """Everything, with each interval."""
    result: dict[str, Any] = {
        "provider": provider,
        "plan": asdict(plan),
        "load_1min": round(os.getloadavg()[0], 2),
        "figures": [asdict(each) for each in figures],
        "latency_us": [
            {"page_bytes": size, "p50": p50, "p99": p99} for size, (p50, p99) in latency.items()
        ],
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def print_text(plan: Plan, provider: str, figures: Sequence[Figure], latency: Latency) -> None:
    """Rates and ratios, then pdx's own times."""
    print_tables([_rates(plan, provider, figures), _pdx_table(figures, latency)])


def _meaning(rounds: int) -> str:
    if rounds < MIN_CONFIDENT:
        return f"its least and its most (95 % confidence takes {MIN_CONFIDENT} rounds)"
    return "what it lies between with 95 % confidence"


def _rates(plan: Plan, provider: str, figures: Sequence[Figure]) -> Table:
    from pdx.lab.transfers.plot import size_text

    found = {(each.system, each.page_bytes): each for each in figures}
    systems = list(dict.fromkeys(each.system for each in figures))
    columns = ("", *map(size_text, plan.page_sizes))
    rows: list[tuple[str, ...]] = []

    def row(label: str, tell: Callable[[Figure], str], system: str) -> None:
        cells = [found.get((system, size)) for size in plan.page_sizes]
        rows.append((label, *("-" if each is None else tell(each) for each in cells)))

    def ratio(label: str, tell: Callable[[Figure], Interval | None], system: str) -> None:
        row(label, lambda each: _median(tell(each)), system)
        row("", lambda each: _bounds(tell(each)), system)

    for system in sorted(systems, key=lambda name: name != "pdx"):
        row(system, lambda each: f"{each.gb_per_s.median:.2f}", system)
    if len(systems) > 1:
        rows.append(("",) * len(columns))
    for system in systems:
        if system != "pdx":
            ratio(f"pdx / {system}", lambda each: each.pdx_to_this, system)
    if any(each.to_raw for each in figures):
        ratio("pdx / better raw", lambda each: each.to_raw, "pdx")
    return Table(
        title=f"GB/s over {provider}, medians of {plan.rounds} rounds",
        columns=columns,
        rows=tuple(rows),
        note=f"under a ratio: {_meaning(plan.rounds)}",
    )


def _median(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.median:.2f}"


def _bounds(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.low:.2f}-{interval.high:.2f}"


def _pdx_table(figures: Sequence[Figure], latency: Latency) -> Table:
    from pdx.lab.transfers.plot import size_text

    rows = []
    for each in figures:
        if each.system == "pdx":
            p50, p99 = latency[each.page_bytes]
            submit = "-" if each.submit_us is None else f"{each.submit_us:.0f}"
            times = (f"{each.us_per_atom:.2f}", submit, f"{p50:.1f}", f"{p99:.1f}")
            rows.append((size_text(each.page_bytes), *times))
    return Table(
        title="pdx, microseconds",
        columns=("page", "a page in a batch", "submit a batch", "one way, p50", "p99"),
        rows=tuple(rows),
        note=f"load of this machine: {os.getloadavg()[0]:.1f}",
    )
