"""The life of the frontend process: configuration in, HTTP port open, served until the primary's
socket closes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import uvicorn

from pdx import __version__
from pdx.errors import InternalError, PdxError, ProtocolError
from pdx.metrics.serving import ServingMetrics
from pdx.request.stream import FrontendConfig, FrontendFailed, FrontendReady
from pdx.server.answer import Service
from pdx.server.app import build_app
from pdx.server.channel import EngineChannel
from pdx.server.checks import RequestChecker
from pdx.server.listen import open_listener
from pdx.server.sampling import SamplingDefaults
from pdx.server.timelines import RecentTimelines
from pdx.text.chat_template import ChatTemplate
from pdx.text.tokenizer import Tokenizer

__all__ = ["serve"]

logger = logging.getLogger(__name__)

#: After the primary's end: for answers on their way, then for whatever hangs.
_GRACE_S = 3
_KILL_AFTER_S = 10
_KEEP_ALIVE_S = 75
_NUM_TOKENIZER_THREADS = 2


async def serve(sock: socket.socket) -> int:
    """Run the frontend on its end of the socket to the primary; returns the exit code."""
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
        server = _Server(_http_config(service))
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

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()

    def end(self) -> None:
        """Let serve() return, after what runs."""
        self.should_exit = True
        self._ended.set()

    async def main_loop(self) -> None:
        """Set the date header once a second. uvicorn's own loop looks ten times a second whether it
        should exit.
        """
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), 1.0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install nothing."""
        yield


def _http_config(service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(service),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )
