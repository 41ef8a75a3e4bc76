"""HTTP connections: what those cost that ask nothing, ask slowly, or do not read.

Runs on the frontend's event loop. A connection is *idle* while no request of it is answered: it has
sent nothing yet, a part of a header, or waits for its client's next request. Idle connections never
keep anyone out: when all places are taken, the one that has been idle for longest is closed for the
new one. Those with a request are never closed for another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from pdx.server.problems import error_body

__all__ = ["Connection", "ConnectionLimits", "Connections"]

logger = logging.getLogger(__name__)

#: How long a closed connection may take to send what its client has not read yet.
_LINGER_S = 10.0
#: What is read of one connection before the others have their turn. asyncio would read 256 KiB,
#: which a body in chunks of one byte makes a second's work.
_READ_BYTES = 16 << 10
_FULL = "all %d HTTP connections are taken (--max-connections, `ulimit -n`): "


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """See FrontendConfig."""

    most: int
    header_timeout_s: float
    #: Longest time in which a client reads nothing of an answer; None: no limit.
    unread_timeout_s: float | None


class Connections:
    """All open connections of a frontend."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._open: set[Connection] = set()
        #: The one that has been idle for longest first.
        self._idle: dict[Connection, None] = {}

    def opened(self, connection: Connection) -> None:
        """A client has connected: it gets a place, if need be that of an idle one."""
        if len(self._open) >= self._limits.most:
            idle = next(iter(self._idle), None)
            if idle is None:
                logger.warning(_FULL + "new ones get a 503", self._limits.most)
                connection.refuse(503, "all of this server's connections are taken; try again")
                return
            logger.warning(_FULL + "idle ones are closed for new ones", self._limits.most)
            self.forget(idle)
            idle.drop()
        self._open.add(connection)
        self._idle[connection] = None

    def set_idle(self, connection: Connection, *, is_idle: bool) -> None:
        """A request of an open connection has begun, or its answer is complete."""
        if not is_idle:
            self._idle.pop(connection, None)
        elif connection in self._open:
            self._idle[connection] = None

    def forget(self, connection: Connection) -> None:
        """It is closed."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def sweep(self) -> None:
        """Close what has taken too long. To be called about once a second."""
        now = time.monotonic()
        for connection in list(self._open):
            connection.check_deadlines(now, self._limits)


class Connection(H11Protocol):
    """One connection: uvicorn's protocol, with times.

    httptools would parse a small request in half the time, but has no limit on a header's length,
    and drops the body of a request that offers an upgrade to HTTP/2, as those of Java's client do.
    """

    def __init__(self, *args: Any, table: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._table = table
        #: When the first byte of the next request's header came, or the connection was made.
        self._asking_since_s: float | None = time.monotonic()
        #: When its client stopped reading.
        self._unread_since_s: float | None = None
        self._closing_since_s: float | None = None
        self._has_sent = False

    @property
    def is_answering(self) -> bool:
        """A request is complete up to its body, and its answer is not."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]
        super().connection_made(transport)
        self._table.opened(self)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._has_sent = True
        if not self.is_answering and self._asking_since_s is None:
            self._asking_since_s = time.monotonic()
        super().data_received(data)
        self._note_state()

    def on_response_complete(self) -> None:
        """Called by uvicorn at the end of each answer."""
        super().on_response_complete()
        self._note_state()

    def pause_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._unread_since_s = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._unread_since_s = None
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.BaseProtocol."""
        self._table.forget(self)
        super().connection_lost(exc)

    def check_deadlines(self, now: float, limits: ConnectionLimits) -> None:
        """Close it where it has taken too long."""
        if self.transport.is_closing():
            self._closing_since_s = self._closing_since_s or now
            if now - self._closing_since_s > _LINGER_S:
                self.drop()
        elif _is_over(self._unread_since_s, limits.unread_timeout_s, now):
            self.drop()
        elif _is_over(self._asking_since_s, limits.header_timeout_s, now):
            if self._has_sent and (self.cycle is None or self.cycle.response_complete):
                self.refuse(408, "the request's header did not arrive in time")
            else:
                self.drop()

    def refuse(self, status: int, message: str) -> None:
        """Answer what has not been asked in full, and close."""
        kind = "overloaded_error" if status == 503 else "invalid_request_error"
        self.transport.write(b"".join(_refusal(status, error_body(message, kind))))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what is no HTTP."""
        self.refuse(400, msg)

    def _unsupported_upgrade_warning(self) -> None:
        """Called by uvicorn. Java's client offers h2c with each request, and is content without."""

    def drop(self) -> None:
        """Close it at once, whatever has not been read."""
        self.transport.abort()

    def _note_state(self) -> None:
        if self.is_answering:
            self._asking_since_s = None
        self._table.set_idle(self, is_idle=not self.is_answering)


def _is_over(since_s: float | None, limit_s: float | None, now: float) -> bool:
    return since_s is not None and limit_s is not None and now - since_s > limit_s


def _refusal(status: int, body: bytes) -> Iterator[bytes]:
    yield f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
    yield b"content-type: application/json\r\nconnection: close\r\n"
    yield f"content-length: {len(body)}\r\n\r\n".encode()
    yield body
