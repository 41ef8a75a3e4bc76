"""The frontend's end of the socket to the primary: submits and aborts go out, updates are handed to
their requests.

Lives on the frontend's event loop. Owns the map from stream ids to waiting requests; a stream
leaves it once, by its last update, its failure, or its request's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import msgspec

from pdx.errors import CapacityError, ProtocolError, WorkerError
from pdx.metrics.timeline import RequestTimeline
from pdx.metrics.transfers import Transfers
from pdx.request.frames import MAX_LOCAL_FRAME_BYTES, encode_frame, read_frame
from pdx.request.ids import IdArray
from pdx.request.names import RequestNames
from pdx.request.request import SamplingParams
from pdx.request.stream import (
    Abort,
    AbortReason,
    FrontendConfig,
    FrontendFailed,
    FrontendReady,
    NodeStatus,
    StepFrame,
    StreamFailed,
    StreamUpdate,
    Submit,
    ToFrontend,
    TransfersAsked,
    TransfersTold,
)

__all__ = ["EngineChannel", "OnTimeline", "StreamGroup"]

_QUERY_S = 5.0

OnTimeline: TypeAlias = Callable[[RequestTimeline], None]

logger = logging.getLogger(__name__)


class StreamGroup:
    """The streams of one HTTP request, one per choice. Closing it aborts those that still run."""

    def __init__(self, channel: EngineChannel, stream_ids: Sequence[int]) -> None:
        self._channel = channel
        self._stream_ids = tuple(stream_ids)
        #: Streams whose updates are still wanted.
        self._choice_of = {stream_id: idx for idx, stream_id in enumerate(stream_ids)}
        self._queue: asyncio.Queue[tuple[int, StreamUpdate | Exception]] = asyncio.Queue()
        self._failure: Exception | None = None
        #: Timelines of streams that have ended, even if nobody has read that they have.
        self._timelines: dict[int, RequestTimeline] = {}

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
        while not (found and self._queue.empty()):
            stream_id, event = await self._queue.get()
            choice_idx = self._choice_of.get(stream_id)
            if choice_idx is None:  # its choice has ended already
                continue
            if isinstance(event, Exception):
                self._failure = event
                break
            found.append((choice_idx, event))
        if self._failure is not None and not found:
            raise self._failure
        return found

    def put(self, stream_id: int, event: StreamUpdate | Exception) -> None:
        """Called by the channel only."""
        if isinstance(event, StreamUpdate) and event.timeline is not None:
            self._timelines[stream_id] = event.timeline
        self._queue.put_nowait((stream_id, event))

    def complete_choice(self, choice_idx: int, on_timeline: OnTimeline) -> None:
        """One choice's text is complete: its stream is aborted if it still runs. Its timeline comes
        then or now, unless the engine fails first.
        """
        stream_id = self._stream_ids[choice_idx]
        self._choice_of.pop(stream_id, None)
        if stream_id in self._timelines:
            on_timeline(self._timelines[stream_id])
        else:
            self._channel.complete(stream_id, on_timeline)

    def close(self, why: AbortReason = AbortReason.LEFT) -> None:
        """End the group; may be called at any time, also twice."""
        self._channel.release(self._stream_ids, why)


class EngineChannel:
    """All streams of this frontend."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(ToFrontend)
        self._groups: dict[int, StreamGroup] = {}
        #: Complete streams whose last update is still to come.
        self._completing: dict[int, OnTimeline] = {}
        self._queries: dict[int, asyncio.Future[Transfers]] = {}
        self._next_stream_id = 1
        self._next_query_id = 1
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
        """Answer the configuration. Where the primary is gone, :meth:`run` ends at once."""
        self._writer.write(encode_frame(message))
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    def submit(
        self,
        streams: Sequence[tuple[list[int], SamplingParams]],
        cache_salt: str,
        names: RequestNames,
    ) -> StreamGroup:
        """Start streams, each a prompt's token ids and its parameters: all, or none.

        Raises:
            CapacityError: too many streams run already.
            WorkerError: the primary is gone.
        """
        if not self._is_open:
            raise WorkerError("the engine has stopped")
        if self.num_streams + len(streams) > self.config.max_streams:
            raise CapacityError(
                f"{self.num_streams} of at most {self.config.max_streams} streams run already; "
                "try again later"
            )
        first = self._next_stream_id
        self._next_stream_id += len(streams)
        stream_ids = range(first, self._next_stream_id)
        group = StreamGroup(self, stream_ids)
        for stream_id, (token_ids, sampling) in zip(stream_ids, streams, strict=True):
            self._groups[stream_id] = group
            submit = Submit(
                stream_id=stream_id,
                token_ids=IdArray(token_ids),
                sampling=sampling,
                cache_salt=cache_salt,
                names=names,
            )
            self._writer.write(encode_frame(submit))
        return group

    def release(self, stream_ids: Iterable[int], why: AbortReason) -> None:
        """Forget these streams; those that still run are aborted."""
        for stream_id in stream_ids:
            if self._groups.pop(stream_id, None) is not None and self._is_open:
                self._writer.write(encode_frame(Abort(stream_id=stream_id, why=why)))

    def complete(self, stream_id: int, on_timeline: OnTimeline) -> None:
        """End a stream that runs and has all that it should; its timeline comes later."""
        if self._groups.pop(stream_id, None) is not None and self._is_open:
            self._completing[stream_id] = on_timeline
            self._writer.write(encode_frame(Abort(stream_id=stream_id, why=AbortReason.COMPLETE)))

    async def transfers(self) -> Transfers:
        """The node's transfers now.

        Raises:
            WorkerError: the primary is gone, or does not answer.
        """
        if not self._is_open:
            raise WorkerError("the engine has stopped")
        query_id = self._next_query_id
        self._next_query_id += 1
        future: asyncio.Future[Transfers] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = future
        self._writer.write(encode_frame(TransfersAsked(query_id=query_id)))
        try:
            async with asyncio.timeout(_QUERY_S):
                return await future
        except TimeoutError:
            raise WorkerError(f"the engine did not answer in {_QUERY_S:g} s") from None
        finally:
            del self._queries[query_id]

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
        for stream_id, group in self._groups.items():
            group.put(stream_id, WorkerError("the engine has stopped"))
        self._groups.clear()
        for query in self._queries.values():
            if not query.done():
                query.set_exception(WorkerError("the engine has stopped"))
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
                self._completing.pop(message.stream_id, None)
                group = self._groups.pop(message.stream_id, None)
                if group is not None:
                    group.put(message.stream_id, message.as_error())
            case NodeStatus():
                self._status = message
            case TransfersTold(query_id=query_id, transfers=transfers):
                query = self._queries.get(query_id)
                if query is not None and not query.done():
                    query.set_result(transfers)
            case FrontendConfig():
                raise ProtocolError("FrontendConfig came twice")

    def _hand_out(self, update: StreamUpdate) -> None:
        if update.timeline is not None:
            on_timeline = self._completing.pop(update.stream_id, None)
            if on_timeline is not None:
                on_timeline(update.timeline)
        if update.finish_reason is None:
            group = self._groups.get(update.stream_id)
        else:
            group = self._groups.pop(update.stream_id, None)
        # None: aborted by us, and this update was under way already.
        if group is not None:
            group.put(update.stream_id, update)
