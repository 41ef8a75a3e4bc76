"""How a serving command lives and ends: until a signal, or until its node fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pdx.cli.output import announce, status_line
from pdx.engine.tasks import run_until_one_ends
from pdx.errors import ConfigError, InternalError
from pdx.process.descriptors import DescriptorShortage
from pdx.process.heap import keep_receive_buffers_apart

if TYPE_CHECKING:
    from pdx.messenger.control import Address
    from pdx.messenger.fabric_hub import FabricOpener
    from pdx.metrics.trace import TraceWriter

__all__ = [
    "DrainRequest",
    "bind",
    "faults",
    "report_on_request",
    "run_until_drained",
    "run_until_signal",
    "say_ready",
    "tracing",
    "url_of",
]


class DrainRequest:
    """The first SIGTERM, for whoever waits for it."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._is_awaited = False

    async def wait(self) -> None:
        """Until then, SIGTERM ends the process at once; from now on the first one only returns
        here.
        """
        self._is_awaited = True
        await self._asked.wait()

    def ask(self) -> bool:
        """Whether somebody who did not know it yet is told."""
        is_news = self._is_awaited and not self._asked.is_set()
        self._asked.set()
        return is_news


class ServingNode(Protocol):
    """A node of any role."""

    async def run(self) -> None:
        """Serve until cancelled."""

    async def drain(self) -> None:
        """Take nothing new; return when all that runs has ended."""


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


def faults() -> tuple[FabricOpener, int]:
    """What PDX_FAULT asks for: where fabrics come from, and how many prompts are rejected.

    Raises:
        ConfigError: it names no fault.
    """
    from pdx.config.faults import faults_from
    from pdx.fabric import open_fabric

    asked = faults_from(os.environ)
    if not asked:
        return open_fabric, 0
    from pdx.lab.faulty_fabric import faulty_opener

    status_line(f"PDX_FAULT is set: this node fails on purpose ({os.environ['PDX_FAULT']})")
    return faulty_opener(asked, open_fabric), asked.get("reject-prefill") or 0


def url_of(bound: Address) -> str:
    """The API's URL at an address, as a client on this host can open it."""
    from pdx.messenger.control import Address

    # All addresses of the host: a client needs one of them.
    loopback = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
    host = loopback.get(bound.host, bound.host).replace("%", "%25")  # the zone of an IPv6 address
    return f"http://{Address(host=host, port=bound.port)}/v1"


def say_ready(bound: Address, line: str, *, what: str) -> None:
    """The node serves. A supervisor gets its address; whoever has started it by hand, what it is
    good for and a line on stdout.
    """
    from pdx.engine.node_report import Ready, Reporter

    reporter = Reporter(os.environ)
    if reporter.is_heard:
        reporter.send(Ready(address=str(bound)))
        return
    status_line(f"{what}:")
    announce(line)


@contextlib.contextmanager
def tracing(file: str | None, node: str) -> Iterator[TraceWriter | None]:
    """The node's trace, where one is asked for.

    Raises:
        OutputError: the file cannot be written.
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


async def run_until_drained(node: ServingNode, request: DrainRequest, timeout_s: float) -> None:
    """Serve until somebody asks for the end, and what runs then has ended or takes too long.

    Raises:
        PdxError: the node failed.
    """

    async def drain() -> None:
        await request.wait()
        status_line(f"finishing what runs ({timeout_s:g} s at most); SIGTERM again ends it")
        try:
            async with asyncio.timeout(timeout_s):
                await node.drain()
        except TimeoutError:
            status_line(f"some requests did not end in {timeout_s:g} s")

    await run_until_one_ends(node.run(), drain())


def run_until_signal(serve: Callable[[DrainRequest], Awaitable[None]]) -> None:
    """Run ``serve`` on a new loop; SIGINT and SIGTERM cancel it, which is a clean end (exit 0). The
    first SIGTERM only asks it to drain, where it waits for that.

    Raises:
        InternalError: a callback of the loop failed. asyncio alone would log that, and the node
            would go on with a broken invariant.
    """

    async def body() -> None:
        request = DrainRequest()
        task = asyncio.ensure_future(serve(request))
        loop = asyncio.get_running_loop()
        bugs: list[Exception] = []

        shortage = DescriptorShortage()

        def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            if shortage.explains(context):
                return
            loop.default_exception_handler(context)
            # Other contexts (a connection, a task) are one peer's or one request's trouble.
            if "handle" in context and isinstance(context.get("exception"), Exception):
                bugs.append(context["exception"])
                task.cancel()

        def on_sigterm() -> None:
            if not request.ask():
                task.cancel()

        loop.set_exception_handler(on_error)
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        loop.add_signal_handler(signal.SIGTERM, on_sigterm)
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if bugs:
            raise InternalError(f"an event was not handled: {bugs[0]!r}") from bugs[0]

    keep_receive_buffers_apart()
    asyncio.run(body())
