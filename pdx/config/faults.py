"""Faults that a node commits on purpose, for tests: ``PDX_FAULT=NAME[@N],...``. Read once, at the
node's start; without the variable nothing of this is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pdx.errors import ConfigError

__all__ = ["FAULTS", "Faults", "faults_from"]

_VARIABLE = "PDX_FAULT"
#: Each fault, what its number is called, the number where none is given, and what happens.
FAULTS: Mapping[str, tuple[str, int, str]] = {
    "stall-write": ("layer", 0, "prefiller: writes from this layer on wait for SIGUSR2"),
    "kill-after-layer": ("", 0, "prefiller: it is killed when a rank is done with this layer"),
    "fail-post": ("page", 0, "prefiller: no transfer's pages from this one on can be posted"),
    "delay-ack": ("", 1000, "prefiller: the end of each transfer is told so many ms later"),
    "reject-prefill": ("", 1 << 30, "prefiller: the first so many prompts are rejected (503)"),
    "drop-completion": ("", 1, "decoder: the so many-th complete count is not noticed"),
    "dup-completion": ("", 0, "decoder: each complete count is noticed twice"),
    "no-heartbeat": ("", 0, "either: no beats are sent"),
}


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults that are asked for, with their numbers."""

    numbers: Mapping[str, int]

    def __bool__(self) -> bool:
        return bool(self.numbers)

    def get(self, name: str) -> int | None:
        """The fault's number; None: it is not asked for."""
        assert name in FAULTS
        return self.numbers.get(name)


def faults_from(env: Mapping[str, str]) -> Faults:
    """The faults that the environment asks for.

    Raises:
        ConfigError: there is no such fault.
    """
    numbers = {}
    for part in filter(None, (each.strip() for each in env.get(_VARIABLE, "").split(","))):
        name, _, place = part.partition("@")
        unit, default, _ = FAULTS.get(name, ("", -1, ""))
        found = re.fullmatch(rf"(?:{unit})?(\d+)" if unit else r"(\d+)", place)
        if default < 0 or (place and found is None):
            known = ", ".join(f"{each}[@{FAULTS[each][0]}N]" for each in FAULTS)
            raise ConfigError(f"{_VARIABLE}: there is no fault {part!r}", hint=f"one of {known}")
        numbers[name] = int(found[1]) if found else default
    return Faults(numbers)
