"""The life of the frontend process: configuration in, HTTP port open, served until the primary's
socket closes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import uvicorn

from pdx import __version__
from pdx.errors import InternalError, PdxError, ProtocolError
from pdx.metrics.serving import ServingMetrics
from pdx.process.descriptors import DescriptorShortage, descriptor_limit
from pdx.process.sparse_log import sparse_warnings
from pdx.request.stream import FrontendConfig, FrontendFailed, FrontendReady
from pdx.server.answer import Service
from pdx.server.app import build_app
from pdx.server.channel import EngineChannel
from pdx.server.checks import RequestChecker
from pdx.server.connections import Connection, ConnectionLimits, Connections
from pdx.server.fields import DroppedFields
from pdx.server.listen import BACKLOG, open_listener
from pdx.server.sampling import SamplingDefaults
from pdx.server.timelines import RecentTimelines
from pdx.text.chat_template import ChatTemplate
from pdx.text.tokenizer import Tokenizer

__all__ = ["serve"]

logger = logging.getLogger(__name__)

#: After the primary's end: for answers on their way, then for whatever hangs.
_GRACE_S = 3
_KILL_AFTER_S = 10
#: So many of the process's file descriptors are kept free of connections.
_RESERVED_DESCRIPTORS = 64
_NUM_TOKENIZER_THREADS = 2


async def serve(sock: socket.socket) -> int:
    """Run the frontend on its end of the socket to the primary; returns the exit code."""
    with sparse_warnings("pdx.server.connections", "uvicorn.error"):
        return await _serve(sock)


async def _serve(sock: socket.socket) -> int:
    shortage = DescriptorShortage()

    def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not shortage.explains(context):
            loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(on_error)
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    channel = EngineChannel(reader, writer)
    try:
        config = await channel.receive_config()
    except asyncio.IncompleteReadError:
        return 0
    except ProtocolError:
        logger.critical("the primary sent no configuration", exc_info=True)
        return 1
    with ThreadPoolExecutor(_NUM_TOKENIZER_THREADS, "tokenizer") as pool:
        try:
            service = _load(config, channel, pool)
            listener = open_listener(config.host, config.port)
        except Exception as error:  # noqa: BLE001 - the process's edge: the primary is told
            await channel.report(_as_failed(error))
            return 1
        gc.freeze()  # what is loaded stays: no collection needs to look at it again
        host, port = listener.getsockname()[:2]
        server = _Server(service, listener)
        await channel.report(FrontendReady(host=host, port=port))
        return await _run(channel, server, listener)


def _load(config: FrontendConfig, channel: EngineChannel, pool: ThreadPoolExecutor) -> Service:
    folder = config.model_folder
    checker = RequestChecker(
        config=config,
        tokenizer=Tokenizer.from_folder(folder),
        template=ChatTemplate.from_folder(folder),
        defaults=SamplingDefaults.from_folder(folder),
        pool=pool,
        on_unknown=DroppedFields().note if config.ignore_unknown_fields else None,
    )
    metrics = ServingMetrics(
        version=__version__,
        model=config.model_name,
        counts=lambda: channel.status.counts,
        num_streams=lambda: channel.num_streams,
    )
    return Service(checker=checker, channel=channel, timelines=RecentTimelines(), metrics=metrics)


def _as_failed(error: Exception) -> FrontendFailed:
    if not isinstance(error, PdxError):
        logger.error("the frontend cannot start", exc_info=error)
        error = InternalError(f"the frontend cannot start: {error!r}")
    return FrontendFailed(kind=type(error).__name__, message=error.message, hint=error.hint)


async def _run(channel: EngineChannel, server: _Server, listener: socket.socket) -> int:
    """Serve until the channel ends: by the primary's end, or by SIGTERM, which also its death
    sends."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, channel.close)
    link = asyncio.create_task(channel.run())
    link.add_done_callback(lambda _: _end(server))
    await server.serve(sockets=[listener])
    try:
        await link
    except ProtocolError:
        logger.critical("the primary broke the protocol", exc_info=True)
        return 1
    return 0


def _end(server: _Server) -> None:
    signal.alarm(_KILL_AFTER_S)  # nothing may keep a process alive that serves nobody
    server.end()


class _Server(uvicorn.Server):
    """Leaves signals alone, for the primary decides when the node ends, and sleeps while idle."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self._connections = Connections(_connection_limits(service.channel.config))
        super().__init__(_http_config(service, self._connections))
        self._listener = listener
        self._ended = asyncio.Event()

    def end(self) -> None:
        """Let serve() return, after what runs."""
        self.should_exit = True
        self._ended.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections."""
        await super().startup(sockets)
        self._listener.listen(BACKLOG)  # asyncio has set its own limit, see _http_config

    async def main_loop(self) -> None:
        """Set the date header and look for connections that take too long, once a second. uvicorn's
        own loop looks ten times a second whether it should exit.
        """
        while not await self.on_tick(0):
            self._connections.sweep()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), 1.0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install nothing."""
        yield


def _connection_limits(config: FrontendConfig) -> ConnectionLimits:
    limit = descriptor_limit()
    possible = limit - min(_RESERVED_DESCRIPTORS, limit // 2)
    most = possible if config.max_connections is None else config.max_connections
    if most > possible:
        logger.warning(
            "--max-connections %d: only %d files may be open (`ulimit -n`), so %d is the limit",
            most,
            limit,
            possible,
        )
    return ConnectionLimits(
        most=min(most, possible),
        header_timeout_s=config.header_timeout_s,
        unread_timeout_s=config.request_timeout_s,
    )


def _http_config(service: Service, connections: Connections) -> uvicorn.Config:
    protocol = partial(Connection, table=connections)
    return uvicorn.Config(
        build_app(service),
        http=cast("type[asyncio.Protocol]", protocol),
        # asyncio accepts as many at once as its backlog, and where descriptors run out it complains
        # as often. One at a time, it stops at the first complaint.
        backlog=1,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=math.ceil(service.channel.config.keep_alive_s),
        timeout_graceful_shutdown=_GRACE_S,
    )
