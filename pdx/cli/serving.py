"""How a serving command lives and ends: until a signal, or until its node fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdx.cli.output import status_line
from pdx.errors import ConfigError, InternalError

if TYPE_CHECKING:
    from pdx.messenger.control import Address
    from pdx.metrics.trace import TraceWriter

__all__ = ["bind", "report_on_request", "run_until_signal", "tracing"]


def bind(address: Address) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: the address cannot be had (exit 1: nothing is wrong with the command line).
    """
    from pdx.server.listen import open_listener

    try:
        return open_listener(address.host, address.port)
    except ConfigError as error:
        error.exit_code = 1
        raise


@contextlib.contextmanager
def tracing(file: str | None, node: str) -> Iterator[TraceWriter | None]:
    """The node's trace, where one is asked for.

    Raises:
        ConfigError: the file cannot be written.
    """
    from pdx.metrics.trace import TraceWriter

    if file is None:
        yield None
        return
    trace = TraceWriter(Path(file).expanduser(), node)
    try:
        yield trace
    finally:
        trace.close()


def report_on_request(status: Callable[[], Mapping[str, int]]) -> None:
    """From now on, SIGUSR1 writes the node's status to stderr, as a line of JSON."""

    def report() -> None:
        # The callback itself is no task.
        tasks = {"asyncio_tasks": len(asyncio.all_tasks(loop))}
        status_line(f"status: {json.dumps({**status(), **tasks})}")

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, report)


def run_until_signal(serve: Callable[[], Awaitable[None]]) -> None:
    """Run ``serve`` on a new loop; SIGINT and SIGTERM cancel it, which is a clean end (exit 0).

    Raises:
        InternalError: a callback of the loop failed. asyncio alone would log that, and the node
            would go on with a broken invariant.
    """

    async def body() -> None:
        task = asyncio.ensure_future(serve())
        loop = asyncio.get_running_loop()
        bugs: list[Exception] = []

        def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            loop.default_exception_handler(context)
            # Other contexts (a connection, a task) are one peer's or one request's trouble.
            if "handle" in context and isinstance(context.get("exception"), Exception):
                bugs.append(context["exception"])
                task.cancel()

        loop.set_exception_handler(on_error)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if bugs:
            raise InternalError(f"an event was not handled: {bugs[0]!r}") from bugs[0]

    asyncio.run(body())
