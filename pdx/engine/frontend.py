"""The frontend process, seen from the decoder's primary: start it, exchange messages with it, stop
it.

It is `python -m pdx.server`: HTTP and text cost most of a core at high load, so they have a process
of their own.
"""

from __future__ import annotations

import asyncio
import contextlib

from pdx.errors import ProtocolError, WorkerError, error_from_report
from pdx.ranks.child import how_it_ended, start_child, stop_child
from pdx.request.frames import (
    MAX_LOCAL_FRAME_BYTES,
    encode_frame,
    frame_decoder,
    read_frame,
)
from pdx.request.stream import (
    Abort,
    FromFrontend,
    FrontendConfig,
    FrontendFailed,
    FrontendReady,
    NodeStatus,
    StepFrame,
    StreamFailed,
    Submit,
    TransfersAsked,
    TransfersTold,
)

__all__ = ["FrontendProcess"]

_decoder = frame_decoder(FromFrontend)


class FrontendProcess:
    """Owns the child process and its channel."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self, config: FrontendConfig) -> FrontendReady:
        """Start it and wait until its HTTP port is open.

        Raises:
            PdxError: of the class that it reported, or WorkerError if it died.
        """
        self._process, ours = await start_child("pdx.server")
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._writer.write(encode_frame(config))
        match await self._receive():
            case FrontendReady() as ready:
                return ready
            case FrontendFailed(kind=kind, message=message, hint=hint):
                error = error_from_report(kind, message)
                error.hint = hint
                # The command line was right: the address is taken, or not this host's.
                error.exit_code = 1
                raise error
            case other:
                raise WorkerError(f"the frontend began with {type(other).__name__}")

    async def receive(self) -> Submit | Abort | TransfersAsked:
        """The next request, abort or query.

        Raises:
            WorkerError: the frontend died.
        """
        message = await self._receive()
        if not isinstance(message, Submit | Abort | TransfersAsked):
            raise WorkerError(f"the frontend sent {type(message).__name__}")
        return message

    def send(self, message: StepFrame | StreamFailed | NodeStatus | TransfersTold) -> None:
        """Queue a message; never blocks."""
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(encode_frame(message))

    async def stop(self) -> None:
        """Close the channel, which ends the process; kill it if it does not."""
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await stop_child(self._process)

    async def _receive(self) -> FromFrontend:
        assert self._reader is not None and self._process is not None
        try:
            message: FromFrontend = await read_frame(self._reader, _decoder, MAX_LOCAL_FRAME_BYTES)
        except (asyncio.IncompleteReadError, OSError, ProtocolError) as error:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._process.wait()
            raise WorkerError(
                f"the frontend (pid {self._process.pid}) {how_it_ended(self._process.returncode)}"
            ) from error
        return message
