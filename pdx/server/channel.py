"""The frontend's end of the socket to the primary: submits and aborts go out, updates are handed to
their requests.

Lives on the frontend's event loop. Owns the map from stream ids to waiting requests; a stream
leaves it once, by its last update, its failure, or its request's end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from pdx.errors import CapacityError, ProtocolError, RequestError, WorkerError
from pdx.request.frames import MAX_LOCAL_FRAME_BYTES, encode_frame, read_frame
from pdx.request.stream import (
    Abort,
    FrontendConfig,
    FrontendFailed,
    FrontendReady,
    NodeStatus,
    StepFrame,
    StreamFailed,
    StreamUpdate,
    Submit,
    ToFrontend,
)
from pdx.server.checks import Prompt

__all__ = ["EngineChannel", "StreamGroup"]

logger = logging.getLogger(__name__)


class StreamGroup:
    """The streams of one HTTP request, one per choice. Closing it aborts those that still run."""

    def __init__(self, channel: EngineChannel, stream_ids: Sequence[int]) -> None:
        self._channel = channel
        self._choice_of = {stream_id: idx for idx, stream_id in enumerate(stream_ids)}
        self._queue: asyncio.Queue[StreamUpdate | Exception] = asyncio.Queue()
        self._failure: Exception | None = None

    async def updates(self) -> list[tuple[int, StreamUpdate]]:
        """All updates that have come since the last call, with their choice's index; waits for at
        least one.

        Raises:
            PdxError: a stream failed. What came before the failure has been returned by earlier
            calls.
        """
        if self._failure is not None:
            raise self._failure
        found: list[tuple[int, StreamUpdate]] = []
        event = await self._queue.get()
        while not isinstance(event, Exception):
            found.append((self._choice_of[event.stream_id], event))
            if self._queue.empty():
                return found
            event = self._queue.get_nowait()
        self._failure = event
        if not found:
            raise event
        return found

    def put(self, event: StreamUpdate | Exception) -> None:
        """Called by the channel only."""
        self._queue.put_nowait(event)

    def close(self) -> None:
        """End the group; may be called at any time, also twice."""
        self._channel.release(self._choice_of)


class EngineChannel:
    """All streams of this frontend."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(ToFrontend)
        self._groups: dict[int, StreamGroup] = {}
        self._next_stream_id = 1
        self._config: FrontendConfig | None = None
        self._is_open = True
        self._status: NodeStatus | None = None

    @property
    def config(self) -> FrontendConfig:
        """The first message; there before anything else is used."""
        assert self._config is not None
        return self._config

    @property
    def num_streams(self) -> int:
        """Streams that run now."""
        return len(self._groups)

    @property
    def status(self) -> NodeStatus:
        """What the primary last said of the node's health."""
        if not self._is_open:
            return NodeStatus(healthy=False, detail="the engine has stopped", counts={})
        return self._status or NodeStatus(
            healthy=False, detail="the engine has not reported yet", counts={}
        )

    async def receive_config(self) -> FrontendConfig:
        """The first message.

        Raises:
            asyncio.IncompleteReadError: the primary is gone.
            ProtocolError: it sent something else.
        """
        message = await self._read()
        if not isinstance(message, FrontendConfig):
            raise ProtocolError(f"expected FrontendConfig, got {type(message).__name__}")
        self._config = message
        return message

    async def report(self, message: FrontendReady | FrontendFailed) -> None:
        """Answer the configuration."""
        self._writer.write(encode_frame(message))
        await self._writer.drain()

    def submit(self, prompts: Sequence[Prompt]) -> StreamGroup:
        """Start one stream per prompt: all, or none.

        Raises:
            CapacityError: too many streams run already.
            WorkerError: the primary is gone.
        """
        if not self._is_open:
            raise WorkerError("the engine has stopped")
        if self.num_streams + len(prompts) > self.config.max_streams:
            raise CapacityError(
                f"{self.num_streams} of at most {self.config.max_streams} streams run already; "
                "try again later"
            )
        first = self._next_stream_id
        self._next_stream_id += len(prompts)
        stream_ids = range(first, self._next_stream_id)
        group = StreamGroup(self, stream_ids)
        for stream_id, prompt in zip(stream_ids, prompts, strict=True):
            self._groups[stream_id] = group
            submit = Submit(
                stream_id=stream_id, token_ids=prompt.token_ids, sampling=prompt.sampling
            )
            self._writer.write(encode_frame(submit))
        return group

    def release(self, stream_ids: Sequence[int] | dict[int, int]) -> None:
        """Forget these streams; those that still run are aborted."""
        for stream_id in stream_ids:
            if self._groups.pop(stream_id, None) is not None and self._is_open:
                self._writer.write(encode_frame(Abort(stream_id=stream_id)))

    async def run(self) -> None:
        """Hand out updates until the primary closes the socket; then every running stream fails.

        Raises:
            ProtocolError: the primary sent what is no message.
        """
        try:
            while True:
                self._dispatch(await self._read())
        except (asyncio.IncompleteReadError, ConnectionError):
            logger.info("the primary closed the socket")
        finally:
            self.close()

    def close(self) -> None:
        """Fail what runs and close the socket."""
        if not self._is_open:
            return
        self._is_open = False
        for group in set(self._groups.values()):
            group.put(WorkerError("the engine has stopped"))
        self._groups.clear()
        self._writer.close()

    async def _read(self) -> ToFrontend:
        message: ToFrontend = await read_frame(self._reader, self._decoder, MAX_LOCAL_FRAME_BYTES)
        return message

    def _dispatch(self, message: ToFrontend) -> None:
        match message:
            case StepFrame():
                for update in message.updates:
                    self._hand_out(update)
            case StreamFailed():
                group = self._groups.pop(message.stream_id, None)
                if group is not None:
                    group.put(_as_error(message))
            case NodeStatus():
                self._status = message
            case FrontendConfig():
                raise ProtocolError("FrontendConfig came twice")

    def _hand_out(self, update: StreamUpdate) -> None:
        if update.finish_reason is None:
            group = self._groups.get(update.stream_id)
        else:
            group = self._groups.pop(update.stream_id, None)
        # None: aborted by us, and this update was under way already.
        if group is not None:
            group.put(update)


def _as_error(failed: StreamFailed) -> RequestError:
    error = RequestError(failed.message)
    error.http_status = failed.http_status
    error.kind = failed.kind
    return error
