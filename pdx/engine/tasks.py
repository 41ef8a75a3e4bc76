"""The tasks of a node: they run side by side, and the first that fails ends them all."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

__all__ = ["run_until_one_fails"]


async def run_until_one_fails(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all until they have returned, one raises, or the caller is cancelled; raises what it
    raised. None of them runs any more then.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
