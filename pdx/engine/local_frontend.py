"""A frontend in the primary's own process: requests come from Python and not from HTTP.

For `pdx generate`, the Python API and tests. Runs on the primary's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from pdx.config.node import ServerConfig
from pdx.errors import InvalidRequest, PdxError
from pdx.request.ids import IdArray
from pdx.request.request import SamplingParams
from pdx.request.stream import (
    Abort,
    FrontendConfig,
    FrontendReady,
    NodeStatus,
    StepFrame,
    StreamFailed,
    StreamUpdate,
    Submit,
    TransfersAsked,
    TransfersTold,
)

__all__ = ["LocalFrontend"]


class Node(Protocol):
    """A node that was made with this frontend (DecodeNode, ColocatedNode)."""

    async def start_frontend(self, server: ServerConfig) -> FrontendReady:
        """Start the frontend."""

    async def run(self) -> None:
        """Serve until cancelled."""


class LocalFrontend:
    """See :class:`pdx.engine.streams.Frontend`; :meth:`generate` is for its users."""

    def __init__(self) -> None:
        self._config: FrontendConfig | None = None
        self._requests: asyncio.Queue[Submit | Abort] = asyncio.Queue()
        self._streams: dict[int, asyncio.Queue[StreamUpdate | BaseException]] = {}
        self._ids = itertools.count(1)

    @contextlib.asynccontextmanager
    async def serving(self, node: Node) -> AsyncIterator[None]:
        """Run the node. Where it fails, its streams fail with it."""
        await node.start_frontend(ServerConfig())
        running = asyncio.create_task(node.run())
        running.add_done_callback(self._fail_all)
        try:
            yield
        finally:
            running.cancel()
            await asyncio.wait([running])

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams
    ) -> AsyncIterator[StreamUpdate]:
        """The updates of one request; the last one has its finish reason. Who stops iterating
        aborts the request.

        Raises:
            InvalidRequest: the prompt is empty or too long, or has ids outside the vocabulary.
            PdxError: the request or the node failed.
        """
        self._check(token_ids, sampling.max_tokens)
        stream_id = next(self._ids)
        stream = self._streams[stream_id] = asyncio.Queue()
        self._requests.put_nowait(
            Submit(stream_id=stream_id, token_ids=IdArray(token_ids), sampling=sampling)
        )
        finished = False
        try:
            while not finished:
                update = await stream.get()
                if isinstance(update, BaseException):
                    finished = True
                    raise update
                finished = update.finish_reason is not None
                yield update
        finally:
            del self._streams[stream_id]
            if not finished:
                self._requests.put_nowait(Abort(stream_id=stream_id))

    def _check(self, token_ids: Sequence[int], max_tokens: int) -> None:
        config = self._config
        assert config is not None, "the node does not run"
        if not token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        wrong = [i for i in token_ids if not 0 <= i < config.vocab_size]
        if wrong:
            raise InvalidRequest(
                f"token id {wrong[0]} is outside the vocabulary of {config.vocab_size}",
                param="prompt",
            )
        if len(token_ids) + max_tokens > config.context_len:
            raise InvalidRequest(
                f"{len(token_ids)} prompt tokens and {max_tokens} output tokens exceed "
                f"the context of {config.context_len}",
                param="max_tokens",
            )

    def _fail_all(self, running: asyncio.Task[None]) -> None:
        if running.cancelled():
            return
        error = running.exception() or PdxError("the node has ended")
        for stream in self._streams.values():
            stream.put_nowait(error)

    # ---- Frontend -------------------------------------------------------------------------

    async def start(self, config: FrontendConfig) -> FrontendReady:
        self._config = config
        return FrontendReady(host="", port=0)

    async def receive(self) -> Submit | Abort | TransfersAsked:
        return await self._requests.get()

    def send(self, message: StepFrame | StreamFailed | NodeStatus | TransfersTold) -> None:
        match message:
            case StepFrame(updates=updates):
                for update in updates:
                    self._put(update.stream_id, update)
            case StreamFailed():
                self._put(message.stream_id, message.as_error())

    def _put(self, stream_id: int, update: StreamUpdate | BaseException) -> None:
        if (stream := self._streams.get(stream_id)) is not None:
            stream.put_nowait(update)

    async def stop(self) -> None:
        """There is no process to end."""
