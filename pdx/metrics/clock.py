"""The clock of the event loop that runs a primary: CLOCK_MONOTONIC in a real node, virtual time in
a simulated one. So the engine and the messenger ask here, and never the system.
"""

from __future__ import annotations

from asyncio import get_running_loop

__all__ = ["now_ns", "now_s"]


def now_s() -> float:
    """Seconds; call it where the loop runs."""
    return get_running_loop().time()


def now_ns() -> int:
    """Nanoseconds, to compare with what ranks, fabrics and peers of this host tell."""
    return round(now_s() * 1e9)
