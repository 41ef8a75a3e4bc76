"""What runs side by side for as long as a node does: the first part that ends, ends them all."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from pdx.engine.step_loop import Ranks  # its packages would slow --help down

__all__ = ["fail_with_ranks", "run_until_one_ends"]


async def run_until_one_ends(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all until one has returned or raises, or the caller is cancelled; raises what it raised.
    None of them runs any more then.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def fail_with_ranks(ranks: Ranks) -> NoReturn:
    """The part that fails when a rank ends.

    Raises:
        WorkerError: why it has.
    """
    raise await ranks.died()
