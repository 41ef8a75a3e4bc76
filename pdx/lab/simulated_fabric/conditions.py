"""What a simulation passes in (the clock) and may vary (how the network behaves). Frozen data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Clock", "Conditions"]


class Clock(Protocol):
    """Virtual time. Two calls for the same time run in the order in which they were asked for."""

    def now_ns(self) -> int:
        """The time; it only moves between two calls."""

    def call_at(self, when_ns: int, callback: Callable[..., None], *args: Any) -> None:
        """Run ``callback(*args)`` at that time, not before this method has returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How the network and the workers behave when nothing is broken. Each delay is drawn evenly
    between two numbers of nanoseconds, for each operation anew, so operations overtake each other.
    """

    #: From the post until the bytes land.
    wire_ns: tuple[int, int] = (2_000, 200_000)
    #: From the post until the writer is told, on "tcp": also before anything has landed. On "shm",
    #: where the target pulls, from the landing.
    completion_ns: tuple[int, int] = (1_000, 150_000)
    #: From the bytes until their immediate is read.
    imm_ns: tuple[int, int] = (0, 30_000)
    #: From a command, a stored progress word or an event until the thread concerned sees it.
    worker_ns: tuple[int, int] = (1_000, 30_000)
    #: Bytes a second from one node to another; None: only the delays count.
    bytes_per_s: float | None = None
    #: How often a post is refused for the moment (EAGAIN).
    refusal_rate: float = 0.0
    #: How often a write's completion never comes; only a fence ends its transfer then.
    completion_loss_rate: float = 0.0
