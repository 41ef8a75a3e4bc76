"""From samples of paired rounds to the figures that are shown: medians, intervals, ratios. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from pdx.lab.transfers.systems import Sample

__all__ = ["MIN_CONFIDENT", "Figure", "Interval", "Results", "interval_of"]

_CONFIDENCE = 0.95
#: Samples from which on the extremes hold the median with that confidence: 1 - 2 / 2**6.
MIN_CONFIDENT = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A median, and what it lies between with 95 % confidence (with few rounds: the extremes)."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One system at one page size, over all rounds."""

    system: str
    page_bytes: int
    rounds: int
    gb_per_s: Interval
    us_per_atom: float
    wrong: int
    #: To the same round's memcpy, and to the better raw row of the same round; None: not measured.
    to_memcpy: Interval | None
    to_raw: Interval | None
    #: pdx's rate in the same round divided by this one: above 1, pdx is faster.
    pdx_to_this: Interval | None
    submit_us: float | None


def interval_of(values: Sequence[float]) -> Interval:
    """An interval by order statistics, which assume nothing about the distribution."""
    ordered = sorted(values)
    n = len(ordered)
    drop = 0
    # The chance that the median lies below the (drop + 1)th smallest of n, or above its twin.
    while 2 * sum(math.comb(n, k) for k in range(drop + 1)) / 2**n <= 1 - _CONFIDENCE:
        drop += 1
    first = max(drop - 1, 0)
    return Interval(median=median(ordered), low=ordered[first], high=ordered[n - 1 - first])


class Results:
    """Samples by system, page size and round. A round in which a system failed has none of it."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], dict[int, Sample]] = {}

    def add(self, system: str, page_bytes: int, round_number: int, sample: Sample) -> None:
        """Keep what was measured."""
        self._samples.setdefault((system, page_bytes), {})[round_number] = sample

    def figures(self) -> list[Figure]:
        """One for each system and page size that was measured at least once."""
        return [self._figure(system, size) for system, size in self._samples]

    def _figure(self, system: str, page_bytes: int) -> Figure:
        samples = self._samples[system, page_bytes]
        submitted = [us for sample in samples.values() for us in sample.submit_us]
        rates = {i: sample.gb_per_s for i, sample in samples.items()}

        def ratio(other: Callable[[int], float | None], *, turned: bool = False) -> Interval | None:
            pairs = [(rate, base) for i, rate in rates.items() if (base := other(i)) is not None]
            ratios = [base / rate if turned else rate / base for rate, base in pairs]
            return interval_of(ratios) if ratios else None

        return Figure(
            system=system,
            page_bytes=page_bytes,
            rounds=len(samples),
            gb_per_s=interval_of(list(rates.values())),
            us_per_atom=median(s.seconds / s.atoms * 1e6 for s in samples.values()),
            wrong=sum(sample.wrong for sample in samples.values()),
            to_memcpy=ratio(lambda i: self._best("memcpy", page_bytes, i)),
            to_raw=ratio(lambda i: self._best("raw", page_bytes, i)),
            pdx_to_this=ratio(lambda i: self._best("pdx", page_bytes, i), turned=True),
            submit_us=median(submitted) if submitted else None,
        )

    def _best(self, prefix: str, page_bytes: int, round_number: int) -> float | None:
        rates = [
            samples[round_number].gb_per_s
            for (system, size), samples in self._samples.items()
            if system.startswith(prefix) and size == page_bytes and round_number in samples
        ]
        return max(rates, default=None)
