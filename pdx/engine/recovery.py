"""Where a prompt's KV cache is to come from, when prefillers fail too. Pure: no socket, clock or
task; the decode node asks on its event loop.

What is decided, in this order:

1. A stream that has begun never fails for the want of a prefiller: where one has failed it, or none
   is there, this node prefills it.
2. A prefiller that has not failed the request, as long as it has been tried less often than the
   policy allows. The most willing first.
3. This node itself, where the policy allows that.
4. A prefiller that has failed the request, as above: the one whose failure is the longest ago.
5. Otherwise the request waits, for as long as the policy says, and then fails with its last error.

A prefiller is trusted while its breaker lets requests through.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pdx.config.node import RecoveryConfig

__all__ = ["Ask", "Breaker", "Candidate", "Place", "decide"]

#: Transfers whose outcomes a breaker remembers, and the fewest that it judges by.
_WINDOW = 20
_FEWEST = 5

#: A prefiller, whatever stands for it.
P = TypeVar("P")


class Breaker:
    """Keeps requests from one prefiller while too many of them fail there.

    It opens when the share of failures reaches the threshold, and lets one request through, as a
    probe, each time it has been open for the pause. A success closes it. Clients that leave say
    nothing about a prefiller.
    """

    def __init__(self, *, failure_rate: float, pause_s: float) -> None:
        self._failure_rate = failure_rate
        self._pause_s = pause_s
        #: True: a failure.
        self._outcomes: deque[bool] = deque(maxlen=_WINDOW)
        #: When it opened, or a probe failed; None: closed.
        self._opened_s: float | None = None
        self._is_probing = False
        self.num_opened = 0

    @property
    def is_open(self) -> bool:
        """Requests go elsewhere, but for probes."""
        return self._opened_s is not None

    def allows(self, now_s: float) -> bool:
        """A request may go there now."""
        if self._opened_s is None:
            return True
        return not self._is_probing and now_s >= self._opened_s + self._pause_s

    def on_asked(self) -> None:
        """A request goes there."""
        self._is_probing = self.is_open

    def on_success(self) -> None:
        """A request's KV cache has come."""
        if self.is_open:
            self.reset()
        self._outcomes.append(False)

    def on_failure(self, now_s: float) -> None:
        """A request's KV cache will not come, and that is not the request's fault."""
        self._outcomes.append(True)
        self._is_probing = False
        if self.is_open:
            self._opened_s = now_s
        elif len(self._outcomes) >= _FEWEST and self._share_failed >= self._failure_rate:
            self._opened_s = now_s
            self.num_opened += 1

    def on_abort(self) -> None:
        """Nobody wants a request any more; its outcome is not known."""
        self._is_probing = False

    def reset(self) -> None:
        """Forget all: the prefiller works, or is another process now."""
        self._outcomes.clear()
        self._opened_s = None
        self._is_probing = False

    @property
    def _share_failed(self) -> float:
        return sum(self._outcomes) / len(self._outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Generic[P]):
    """A prefiller as a decision sees it."""

    prefiller: P
    #: It is connected and holds the prompt.
    able: bool
    #: Its breaker lets the request through.
    trusted: bool


class Place(enum.Enum):
    """What to do but to ask a prefiller."""

    #: Prefill on this node.
    HERE = enum.auto()
    #: Look again later.
    WAIT = enum.auto()
    #: Fail the request.
    GIVE_UP = enum.auto()


@dataclass(frozen=True, slots=True)
class Ask(Generic[P]):
    """Ask this prefiller."""

    prefiller: P


def decide(
    policy: RecoveryConfig,
    candidates: Sequence[Candidate[P]],
    *,
    failed: Sequence[P],
    has_begun: bool,
    waited_s: float,
) -> Ask[P] | Place:
    """What to do about a request that needs a prompt's KV cache; see the module's docstring.

    Args:
        candidates: the most willing first.
        failed: the prefillers that have failed the request, the latest last.
        has_begun: its client has tokens already.
        waited_s: since it first had to wait.
    """
    willing = [each.prefiller for each in candidates if each.able and each.trusted]
    fresh = [each for each in willing if each not in failed]
    may_ask = len(failed) <= policy.prefill_retries
    if has_begun and (failed or not willing):
        return Place.HERE
    if fresh and may_ask:
        return Ask(fresh[0])
    if policy.local_fallback:
        return Place.HERE
    if not may_ask:
        return Place.GIVE_UP
    if willing:
        return Ask(min(willing, key=lambda each: _last_place(failed, each)))
    return Place.WAIT if waited_s < policy.prefiller_wait_s else Place.GIVE_UP


def _last_place(failed: Sequence[P], prefiller: P) -> int:
    return len(failed) - 1 - failed[::-1].index(prefiller)
