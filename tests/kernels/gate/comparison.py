"""Compiled launches beside their records: what breaks a limit, what has become larger.

With the records' own Triton a difference is a failure (`test_gate`); with another one it is told,
in a table of whatever fails or is worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Comparison", "differences", "summary"]

#: Between a change of the code that was meant and its results being written.
TOLERANCE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One launch under another Triton."""

    label: str
    #: What no record excuses, or why it does not compile.
    faults: tuple[str, ...] = ()
    #: Recorded and found, of each figure that differs.
    changed: dict[str, tuple[int, int]]

    @property
    def is_worse(self) -> bool:
        """Whether a figure has grown: more registers, more shared memory, a longer loop."""
        return any(now > before for before, now in self.changed.values())


def differences(found: dict[str, Any], recorded: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Recorded and found, of figures that are more than a tenth apart."""
    pairs = {name: (recorded[name], found[name]) for name in ("registers", "shared_bytes")}
    pairs["loop"] = recorded["loop"]["total"], found["loop"]["total"]
    return {
        name: (before, now)
        for name, (before, now) in pairs.items()
        if abs(now - before) > TOLERANCE * max(before, 1)
    }


def summary(compared: Sequence[Comparison], version: str, recorded_with: str) -> list[str]:
    """Lines: how many fail, are worse, better, alike; then those that fail, and those worse."""
    failed = [each for each in compared if each.faults]
    others = [each for each in compared if not each.faults]
    worse = [each for each in others if each.is_worse]
    better = [each for each in others if each.changed and not each.is_worse]
    alike = len(others) - len(worse) - len(better)
    head = (
        f"Triton {version} beside {recorded_with}: {len(failed)} of {len(compared)} fail, "
        f"{len(worse)} are worse, {len(better)} better, {alike} alike"
    )
    listed = failed + worse
    width = max((len(each.label) for each in listed), default=0)
    return [head, *(f"  {each.label.ljust(width)}  {_told(each)}" for each in listed)]


def _told(each: Comparison) -> str:
    figures = [f"{name} {before} -> {now}" for name, (before, now) in each.changed.items()]
    return "; ".join([*(f"FAILS: {fault}" for fault in each.faults), *figures])
