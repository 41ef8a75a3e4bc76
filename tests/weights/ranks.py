"""A rank among others that are never met."""

from __future__ import annotations

from dataclasses import dataclass

from pdx.models.sharding import LoneRank


@dataclass(frozen=True)
class LastOf(LoneRank):
    """A group's last rank: it may be built and loaded, but not run."""

    size: int

    @property
    def rank(self) -> int:
        return self.size - 1
