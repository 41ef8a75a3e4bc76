"""From outcomes to figures: percentiles, ratios of two servers, tables. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pdx.cli.tables import Table
from pdx.lab.load.client import Outcome

__all__ = ["percentile", "ratios", "summary", "tables", "times_of"]

_PERCENTS = (50, 90, 99)
_TIMES = {
    "ttft_s": "first token",
    "itl_s": "between events",
    "tpot_s": "per token",
    "e2e_s": "whole request",
}
_RATES = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "all tokens/s",
}


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest; the values need not be sorted.

    Args:
        percent: 0 to 100.
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def times_of(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """The times of what went well, seconds, by figure."""
    good = [each for each in outcomes if each.error is None]
    times: dict[str, list[float]] = {
        "ttft_s": [each.ttft_s for each in good if each.ttft_s is not None],
        "itl_s": [gap for each in good for gap in each.gaps_s],
        "tpot_s": [],
        "e2e_s": [each.e2e_s for each in good if each.e2e_s is not None],
    }
    for each in good:
        if each.output_len > 1 and each.e2e_s is not None and each.ttft_s is not None:
            times["tpot_s"].append((each.e2e_s - each.ttft_s) / (each.output_len - 1))
    return times


def summary(outcomes: Sequence[Outcome], wall_s: float) -> dict[str, Any]:
    """A round's figures."""
    good = [each for each in outcomes if each.error is None]
    prompt_len = sum(each.prompt_len for each in good)
    output_len = sum(each.output_len for each in good)
    errors = Counter(each.error for each in outcomes if each.error is not None)
    figures: dict[str, Any] = {
        "requests": len(outcomes),
        "completed": len(good),
        "errors": dict(errors.most_common()),
        "wall_s": wall_s,
        "prompt_tokens": prompt_len,
        "output_tokens": output_len,
        "requests_per_s": len(good) / wall_s,
        "output_tokens_per_s": output_len / wall_s,
        "total_tokens_per_s": (prompt_len + output_len) / wall_s,
        "late_s": _spread([each.late_s for each in outcomes]),
    }
    return figures | {name: _spread(values) for name, values in times_of(outcomes).items()}


def ratios(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The second server's figures over the first's, of one pair of rounds; None where one has
    none.
    """
    over: dict[str, Any] = {name: _over(second[name], first[name]) for name in _RATES}
    for name in _TIMES:
        one, other = first[name], second[name]
        over[name] = (
            None
            if one is None or other is None
            else {percent: _over(other[percent], one[percent]) for percent in one}
        )
    return over


def tables(urls: Sequence[str], rounds: Sequence[Sequence[dict[str, Any]]]) -> list[Table]:
    """What people read: a table for each server (the median over its rounds), and the ratios."""
    found = [_table(url, [pair[i] for pair in rounds]) for i, url in enumerate(urls)]
    if len(urls) == 2:
        found.append(_ratio_table([ratios(first, second) for first, second in rounds]))
    return found


def _table(url: str, rounds: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for name, title in _TIMES.items():
        cells = [_median([each[name][key] for each in rounds if each[name]]) for key in _keys()]
        rows.append((title, *map(_milliseconds, cells)))
    columns = ("", *_keys())
    rows.append(("",) * len(columns))
    for name, title in _RATES.items():
        mean = f"{_median([each[name] for each in rounds]):.1f}"
        rows.append((title, *("" for _ in _PERCENTS), mean))
    return Table(title=url, columns=columns, rows=tuple(rows), note=_caption(rounds))


def _caption(rounds: Sequence[dict[str, Any]]) -> str:
    completed, asked = (sum(each[key] for each in rounds) for key in ("completed", "requests"))
    errors = sum((Counter(each["errors"]) for each in rounds), Counter[str]())
    parts = [f"{completed} of {asked} requests completed"]
    parts += [f"{count} x {kind}" for kind, count in errors.most_common()]
    late_s = max((each["late_s"]["p99"] for each in rounds if each["late_s"]), default=0.0)
    if late_s > 0.05:
        parts.append(f"the client was late by up to {late_s * 1e3:.0f} ms (p99): it is too slow")
    return "; ".join(parts)


def _ratio_table(pairs: Sequence[dict[str, Any]]) -> Table:
    keys = [f"p{percent}" for percent in _PERCENTS]
    rows = []
    for name, title in _TIMES.items():
        found = [[pair[name][key] for pair in pairs if pair[name]] for key in keys]
        rows.append((title, *map(_ratio_cell, found)))
    rows.append(("",) * (1 + len(keys)))
    for name, title in _RATES.items():
        rows.append((title, _ratio_cell([pair[name] for pair in pairs]), *("" for _ in keys[1:])))
    return Table(
        title="the second over the first",
        columns=("", *keys),
        rows=tuple(rows),
        note=f"median of {len(pairs)} pairs of rounds (lowest–highest)",
    )


def _ratio_cell(found: Sequence[float | None]) -> str:
    values = [each for each in found if each is not None]
    if not values:
        return "-"
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def _keys() -> list[str]:
    return [*(f"p{percent}" for percent in _PERCENTS), "mean"]


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    percentiles = {f"p{percent}": percentile(values, percent) for percent in _PERCENTS}
    return percentiles | {"mean": statistics.fmean(values)}


def _over(second: float, first: float) -> float | None:
    return second / first if first else None


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def _milliseconds(value_s: float) -> str:
    return "-" if math.isnan(value_s) else f"{value_s * 1e3:.1f} ms"
