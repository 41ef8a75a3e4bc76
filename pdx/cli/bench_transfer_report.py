"""What `pdx bench transfer` prints: tables, or one JSON object."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pdx.fabric.bench.figures import MIN_CONFIDENT

if TYPE_CHECKING:
    from rich.table import Table

    from pdx.fabric.bench.figures import Figure, Interval
    from pdx.fabric.bench.run import Plan

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
    from rich.console import Console

    console = Console()
    console.print(_rates(plan, provider, figures))
    console.print(_pdx_table(figures, latency))
    console.print(f"Under a ratio: {_meaning(plan.rounds)}.", highlight=False)
    console.print(f"Load of this machine: {os.getloadavg()[0]:.1f}.", highlight=False)


def _meaning(rounds: int) -> str:
    if rounds < MIN_CONFIDENT:
        return f"its least and its most (95 % confidence takes {MIN_CONFIDENT} rounds)"
    return "what it lies between with 95 % confidence"


def _rates(plan: Plan, provider: str, figures: Sequence[Figure]) -> Table:
    from rich.table import Table

    from pdx.fabric.bench.plot import size_text

    title = f"GB/s over {provider}, medians of {plan.rounds} rounds"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for size in plan.page_sizes:
        table.add_column(size_text(size), justify="right")
    found = {(each.system, each.page_bytes): each for each in figures}
    systems = list(dict.fromkeys(each.system for each in figures))

    def row(label: str, tell: Callable[[Figure], str], system: str) -> None:
        cells = [found.get((system, size)) for size in plan.page_sizes]
        table.add_row(label, *("-" if each is None else tell(each) for each in cells))

    for system in sorted(systems, key=lambda name: name != "pdx"):
        row(system, lambda each: f"{each.gb_per_s.median:.2f}", system)
    table.add_section()
    for system in systems:
        if system != "pdx":
            row(f"pdx / {system}", lambda each: _ratio(each.pdx_to_this), system)
    if any(each.to_raw for each in figures):
        row("pdx / better raw", lambda each: _ratio(each.to_raw), "pdx")
    return table


def _ratio(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    return f"{interval.median:.2f}\n{interval.low:.2f}-{interval.high:.2f}"


def _pdx_table(figures: Sequence[Figure], latency: Latency) -> Table:
    from rich.table import Table

    from pdx.fabric.bench.plot import size_text

    table = Table(title="pdx, microseconds", title_justify="left")
    for column in ("page", "a page in a batch", "submit a batch", "one way, p50", "p99"):
        table.add_column(column, justify="right")
    for each in figures:
        if each.system == "pdx":
            p50, p99 = latency[each.page_bytes]
            submit = "-" if each.submit_us is None else f"{each.submit_us:.0f}"
            page = f"{each.us_per_atom:.2f}"
            table.add_row(size_text(each.page_bytes), page, submit, f"{p50:.1f}", f"{p99:.1f}")
    return table
