"""The control port: takes connections, and bounds what those cost that have not said who they are.

Runs on the primary's event loop. A connection is a *stranger* until :meth:`ControlListener.known`
is told of it. Strangers are closed after a time, and when there are too many, the oldest gives its
place to the newest: a peer says who it is within milliseconds, so that it gets in however many
others hold connections and say nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from pdx.messenger.control import Address, ControlConnection, reachable
from pdx.process.descriptors import descriptor_limit

__all__ = ["MAX_STRANGERS", "ControlListener"]

#: Each has one frame of MAX_OPENING_FRAME_BYTES at most.
MAX_STRANGERS = 128
#: From the connection to the end of the handshake.
_HANDSHAKE_S = 20.0
_STOP_S = 2.0
_BACKLOG = 128


class ControlListener:
    """See the module's docstring.

    Args:
        sock: where it listens; closed by :meth:`close`.
        serve: a connection's whole life, in a task of its own, which closes the connection.
        max_strangers: None: MAX_STRANGERS, or a quarter of the files that may be open.
    """

    def __init__(
        self,
        sock: socket.socket,
        serve: Callable[
            [ControlConnection, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]
        ],
        *,
        max_strangers: int | None = None,
        handshake_s: float = _HANDSHAKE_S,
    ) -> None:
        self._sock = sock
        self._serve = serve
        # Most descriptors are for those who are known, and for the node's own work.
        self._max_strangers = max_strangers or min(MAX_STRANGERS, descriptor_limit() // 4)
        self._handshake_s = handshake_s
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        #: The oldest first, with the end of its time.
        self._strangers: dict[ControlConnection, asyncio.TimerHandle] = {}

    @property
    def num_strangers(self) -> int:
        return len(self._strangers)

    async def listen(self) -> list[Address]:
        """Take connections; returns the addresses that peers may use, the likeliest first."""
        # asyncio accepts as many at once as its backlog, before a stranger among them can be
        # dropped; the kernel may hold more.
        self._server = await asyncio.start_server(self._on_connection, sock=self._sock, backlog=1)
        self._sock.listen(_BACKLOG)
        host, port = self._sock.getsockname()[:2]
        return reachable(Address(host=host, port=port))

    def known(self, connection: ControlConnection) -> None:
        """A connection has said who it is; nothing of this bounds it any more."""
        timer = self._strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Take no more connections."""
        if self._server is not None:
            self._server.close()

    async def end(self) -> None:
        """End the connections' tasks."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_S)

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = ControlConnection(reader, writer)
        loop = asyncio.get_running_loop()
        if len(self._strangers) >= self._max_strangers:
            oldest = next(iter(self._strangers))
            self._drop(oldest, f"more than {self._max_strangers} have not said who they are")
        self._strangers[connection] = loop.call_later(
            self._handshake_s, self._drop, connection, "it has not said who it is in time"
        )
        # Cancelled when we stop. asyncio would log the end of a connection's task that says so.
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await self._serve(connection, reader, writer)
        finally:
            self.known(connection)
            self._tasks.discard(task)

    def _drop(self, connection: ControlConnection, reason: str) -> None:
        self.known(connection)
        connection.drop(reason)
