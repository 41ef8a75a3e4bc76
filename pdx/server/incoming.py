"""What comes in on a connection while it is served: the body, and the client's leave."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import Receive

from pdx.request.stream import FrontendConfig

__all__ = ["ClientLeft", "deadline_in", "read_body", "while_connected"]

#: A body that is too long is read up to this many times the limit and dropped, so that its sender
#: gets to read the answer.
_DRAIN_FACTOR = 4


class ClientLeft(Exception):
    """The connection ended before the answer did."""


def deadline_in(limit_s: float | None) -> float | None:
    """The time of the running loop's clock at which a request that comes now is over."""
    return None if limit_s is None else asyncio.get_running_loop().time() + limit_s


async def read_body(receive: Receive, config: FrontendConfig, deadline_s: float | None) -> bytes:
    """The whole body.

    Args:
        deadline_s: the whole request's.

    Raises:
        HTTPException: it is too long (413), or not here in time (408).
        ClientLeft: the connection ended.
    """
    body_deadline_s = asyncio.get_running_loop().time() + config.body_timeout_s
    try:
        async with asyncio.timeout_at(min(body_deadline_s, deadline_s or body_deadline_s)):
            return await _read(receive, config.max_body_bytes)
    except TimeoutError:
        # What is still to come of the body would be taken for the next request.
        headers = {"connection": "close"}
        raise HTTPException(408, "the body did not arrive in time", headers) from None


async def _read(receive: Receive, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes <= max_bytes:
            parts.append(part)
        elif num_bytes > _DRAIN_FACTOR * max_bytes or not message.get("more_body"):
            raise HTTPException(413, f"the body is longer than {max_bytes} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; cancel it when the client leaves.

    Raises:
        ClientLeft: it left first.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_wait_for_leave(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_for_leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
