"""The requests of a serving node's clients, each of which the frontend serves as an HTTP stream:
takes them from the frontend, sends tokens, failures and health back.

The same for a decoder and for a colocated node, which own it and call it; it calls neither. Runs on
the primary's event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from pdx.config.node import ServerConfig
from pdx.engine.decode_request import DecodeRequest
from pdx.engine.frontend import FrontendProcess
from pdx.engine.loading import LoadedModel
from pdx.engine.throughput import Throughput
from pdx.errors import RequestError
from pdx.messenger.control import parse_address
from pdx.metrics.timeline import RequestTimeline
from pdx.metrics.trace import TraceWriter
from pdx.metrics.transfers import Transfers
from pdx.request.request import FinishReason
from pdx.request.stream import (
    Abort,
    AbortReason,
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
from pdx.scheduler.request import RequestUpdate
from pdx.scheduler.scheduler import Scheduler

__all__ = ["Frontend", "Streams"]

#: How the node counts the ends of streams that the frontend gave up.
_COUNTED_AS = {
    AbortReason.COMPLETE: "finished",
    AbortReason.LEFT: "aborted",
    AbortReason.TIMEOUT: "timed_out",
    AbortReason.SIBLING_FAILED: "aborted",
}
_STATUS_S = 0.1
#: The longest between two looks at a node to which nothing happens.
_IDLE_STATUS_S = 0.4


class Frontend(Protocol):
    """Whoever brings the streams and takes their tokens (FrontendProcess, or a simulation's)."""

    async def start(self, config: FrontendConfig) -> FrontendReady:
        """Start it; returns once it takes requests."""

    async def receive(self) -> Submit | Abort | TransfersAsked:
        """The next request, abort or query."""

    def send(self, message: StepFrame | StreamFailed | NodeStatus | TransfersTold) -> None:
        """Queue a message; never blocks."""

    async def stop(self) -> None:
        """End it."""


class Streams:
    """Owns the frontend (a process, unless one is given) and what is known of each stream besides
    its tokens.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        scheduler: Scheduler,
        trace: TraceWriter | None = None,
        frontend: Frontend | None = None,
    ) -> None:
        self._loaded = loaded
        self._scheduler = scheduler
        self._trace = trace
        self._frontend: Frontend = frontend or FrontendProcess()
        #: Requests that have not ended, by request id, which is the frontend's stream id.
        self.requests: dict[int, DecodeRequest] = {}
        #: Faults and events by name.
        self.counters: Counter[str] = Counter()
        self.throughput = Throughput(scheduler)
        #: Nothing new is taken.
        self.is_draining = False
        self._request_ended = asyncio.Event()
        self._status: Callable[[], NodeStatus] | None = None

    async def start_frontend(self, server: ServerConfig, model_name: str) -> FrontendReady:
        """Start the HTTP frontend.

        Raises:
            PdxError: it cannot start.
        """
        model, http = self._loaded.model, parse_address(server.http)
        return await self._frontend.start(
            FrontendConfig(
                model_folder=str(self._loaded.folder),
                model_name=model_name,
                context_len=self._loaded.context_len,
                vocab_size=model.vocab_size,
                eos_token_ids=model.eos_token_ids,
                host=http.host,
                port=http.port,
                max_streams=server.max_streams,
                api_key=server.api_key,
                request_timeout_s=server.request_timeout_s or None,
                max_body_bytes=server.max_body_bytes,
                cors_origins=server.cors_origins,
                ignore_unknown_fields=server.ignore_unknown_fields,
                header_timeout_s=server.header_timeout_s,
                body_timeout_s=server.body_timeout_s,
                keep_alive_s=server.keep_alive_s,
                max_connections=server.max_connections,
            )
        )

    async def receive(self) -> Submit | Abort | TransfersAsked:
        """What the frontend wants next.

        Raises:
            WorkerError: the frontend died.
        """
        return await self._frontend.receive()

    async def report(self, status: Callable[[], NodeStatus]) -> None:
        """Tell the frontend how the node is, when that changes, until cancelled."""
        self._status = status
        last = None
        wait_s = _STATUS_S
        while True:
            now = status()
            wait_s = min(2 * wait_s, _IDLE_STATUS_S) if now == last else _STATUS_S
            if now != last:
                self._frontend.send(now)
                last = now
            await asyncio.sleep(wait_s)

    async def drain(self) -> None:
        """Refuse new streams; return when those that run have ended."""
        self.is_draining = True
        if self._status is not None:
            self._frontend.send(self._status())
        while self.requests:
            self._request_ended.clear()
            await self._request_ended.wait()

    async def stop(self) -> None:
        """End the frontend."""
        await self._frontend.stop()

    def fail(self, request_id: int, error: RequestError) -> None:
        """End a request with an error."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        self._ended(request, error.kind)
        self._scheduler.abort(request_id)
        self.refuse(request_id, error)

    def send_updates(self, updates: list[RequestUpdate]) -> None:
        """Send what the pass has brought, in one frame."""
        frame = []
        for update in updates:
            request = self.requests.get(update.request_id)
            if request is not None and update.prompt_scores is not None:
                request.on_own_scores(update.prompt_scores)
            if request is not None and (update.token_ids or update.finish_reason is not None):
                frame.append(self._stream_update(request, update))
        if frame:
            self._frontend.send(StepFrame(updates=frame))

    def counts(self) -> dict[str, int]:
        """Pages by state, queues, faults and events."""
        pages = self._scheduler.pool.counts()._asdict()
        return {
            **{f"pages_{state}": count for state, count in pages.items()},
            "requests_waiting": self._scheduler.num_waiting,
            "requests_active": self._scheduler.num_active,
            "preemptions": self._scheduler.num_preemptions,
            **self.counters,
        }

    def open(self, submit: Submit) -> None:
        """The scheduler has a client's request."""
        self.requests[submit.stream_id] = DecodeRequest(
            request_id=submit.stream_id,
            prompt_len=len(submit.token_ids),
            prompt_logprobs_wanted=submit.sampling.prompt_logprobs,
            names=submit.names,
        )

    def close(self, abort: Abort) -> DecodeRequest | None:
        """The frontend wants nothing more of a request. Returns it; None: it has ended already."""
        request = self.requests.pop(abort.stream_id, None)
        if request is None:
            return None
        self.counters[_COUNTED_AS[abort.why]] += 1
        self._scheduler.abort(abort.stream_id)
        timeline = self._ended(request, abort.why.value)
        if abort.why is AbortReason.COMPLETE:
            last = StreamUpdate(
                stream_id=abort.stream_id,
                token_ids=[],
                finish_reason=FinishReason.STOP,
                timeline=timeline,
            )
            self._frontend.send(StepFrame(updates=[last]))
        return request

    def refuse(self, stream_id: int, error: RequestError) -> None:
        """Answer a request with an error."""
        self.counters[f"failed_{error.kind}"] += 1
        self._frontend.send(
            StreamFailed(
                stream_id=stream_id,
                http_status=error.http_status,
                kind=error.kind,
                message=error.message if error.hint is None else f"{error.message}; {error.hint}",
            )
        )

    def tell_transfers(self, asked: TransfersAsked, transfers: Transfers) -> None:
        """Answer somebody who looks at the node's transfers."""
        self._frontend.send(TransfersTold(query_id=asked.query_id, transfers=transfers))

    def _stream_update(self, request: DecodeRequest, update: RequestUpdate) -> StreamUpdate:
        is_first = request.first_token_s is None
        request.on_tokens(len(update.token_ids))
        self.throughput.num_generated_tokens += len(update.token_ids)
        if is_first:
            self.throughput.num_prompt_tokens += request.prompt_len
            self.throughput.on_admitted(request.prompt_len, request.num_cached)
        timeline = None
        if update.finish_reason is not None:
            timeline = self._ended(request, update.finish_reason.value)
            del self.requests[update.request_id]
            self.counters["finished"] += 1
        return StreamUpdate(
            stream_id=update.request_id,
            token_ids=update.token_ids,
            logprobs=update.logprobs,
            prompt_logprobs=request.take_prompt_logprobs(),
            num_cached=request.num_cached,
            prefiller=request.prefiller if is_first else None,
            finish_reason=update.finish_reason,
            timeline=timeline,
        )

    def _ended(self, request: DecodeRequest, end: str) -> RequestTimeline:
        self._request_ended.set()
        timeline = request.timeline()
        if self._trace is not None:
            self._trace.on_request(request.request_id, request.arrival_s, timeline, end)
        return timeline
