"""How a serving command lives and ends: until a signal, or until its node fails."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable

from pdx.errors import ConfigError

__all__ = ["check_fabric", "run_until_signal"]


def check_fabric(name: str) -> str:
    """One of auto, tcp and shm.

    Raises:
        ConfigError: it is another name.
    """
    if name not in ("auto", "tcp", "shm"):
        raise ConfigError(f"fabric {name!r} is not known", hint="use auto, tcp or shm")
    return name


def run_until_signal(serve: Callable[[], Awaitable[None]]) -> None:
    """Run ``serve`` on a new loop; SIGINT and SIGTERM cancel it, which is a clean end (exit 0)."""

    async def body() -> None:
        task = asyncio.ensure_future(serve())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(body())
