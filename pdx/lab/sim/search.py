"""Runs histories, and makes one that fails as small as it gets."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pdx.lab.sim.history import History, Outcome
from pdx.lab.sim.scenario import FaultKind, ScenarioOptions, draw_scenario

__all__ = ["command_line", "few_collections", "run_history", "shrink"]

#: What the real code says while it is simulated, of peers that were lost and so on.
_LOGGERS = ("pdx.engine", "pdx.messenger")
#: A history or two leave as many objects.
_ALLOCATIONS_A_COLLECTION = 50_000


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def few_collections() -> Iterator[None]:
    """Garbage is looked for rarely, and only in what is made from here on.

    A history makes many objects and has few cycles before its end. The default looks at everything
    that was imported every few histories, and at each history's living objects a hundred times:
    a sixth of its time.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS_A_COLLECTION, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def run_history(seed: int, options: ScenarioOptions, *, recorded: bool = False) -> Outcome:
    """The history of a seed."""
    with _quiet():
        return History(draw_scenario(seed, options), recorded=recorded).run()


def shrink(
    seed: int, options: ScenarioOptions, invariant: str, *, most_runs: int = 300
) -> ScenarioOptions:
    """Options with as few faults and requests as break the same invariant.

    Leaves out halves, quarters and so on, down to single ones, as long as that helps.
    """
    runs_left = most_runs

    def still_breaks(tried: ScenarioOptions) -> bool:
        nonlocal runs_left
        runs_left -= 1
        broken = run_history(seed, tried).broken
        return broken is not None and broken.invariant == invariant

    faults = _numbers(options.only_faults, options.num_faults)
    kept = _fewest(
        faults,
        lambda some: runs_left > 0 and still_breaks(replace(options, only_faults=tuple(some))),
    )
    options = replace(options, only_faults=tuple(kept))
    requests = _numbers(options.only_requests, options.num_requests)
    kept = _fewest(
        requests,
        lambda some: runs_left > 0 and still_breaks(replace(options, only_requests=tuple(some))),
    )
    return replace(options, only_requests=tuple(kept))


def command_line(seed: int, options: ScenarioOptions) -> str:
    """The command that runs this very history."""
    parts = [
        f"pdx sim --seed {seed} --nodes {options.num_prefillers}x{options.num_decoders}",
        f"--requests {options.num_requests} --fault-count {options.num_faults}",
    ]
    if options.faults != tuple(FaultKind):
        parts.append(f"--faults {','.join(options.faults)}")
    for name, numbers in (
        ("requests", options.only_requests),
        ("faults", options.only_faults),
    ):
        if numbers is not None:
            parts.append(f"--only-{name} {','.join(map(str, numbers)) or 'none'}")
    return " ".join(parts)


def _numbers(only: tuple[int, ...] | None, count: int) -> list[int]:
    return list(range(count)) if only is None else list(only)


def _fewest(numbers: Sequence[int], breaks: Callable[[list[int]], bool]) -> list[int]:
    kept = list(numbers)
    size = len(kept)
    while size:
        start = 0
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            if breaks(fewer):
                kept = fewer
            else:
                start += size
        size //= 2
    return kept
