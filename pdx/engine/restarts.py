"""When a node that ended is started again, and when that is given up. Pure: times are passed in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

__all__ = ["RestartPolicy", "Restarts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often a node is started again, and how long it is left alone before."""

    #: How many times in a row, at most; 0: a node that ends is not started again.
    most: int
    first_pause_s: float = 0.5
    #: Each further pause is twice the one before, up to this.
    longest_pause_s: float = 30.0
    #: A node that has served for this long is as good as new: nothing before counts any more.
    settled_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How one node has fared. Each event gives a new value."""

    policy: RestartPolicy
    #: Restarts in a row, none of which has served for long.
    count: int = 0
    #: Since when it serves; None: it does not.
    serving_since_s: float | None = None

    def ready(self, now_s: float) -> Restarts:
        """It serves from now on."""
        return dataclasses.replace(self, serving_since_s=now_s)

    def ended(self, now_s: float) -> tuple[Restarts, float | None]:
        """It has ended. Returns also the seconds to wait before it is started again; None: it is
        given up.
        """
        since_s, policy = self.serving_since_s, self.policy
        is_settled = since_s is not None and now_s - since_s >= policy.settled_s
        count = 0 if is_settled else self.count
        after = dataclasses.replace(self, count=count + 1, serving_since_s=None)
        if count >= policy.most:
            return after, None
        # A power of two that is far above any pause would not fit into a float.
        pause_s = policy.first_pause_s * 2.0 ** min(count, 64)
        return after, min(pause_s, policy.longest_pause_s)
