"""What a decoder and a colocated node have in common: requests come from a frontend, the scheduler
runs them, and tokens go back.

Runs on the primary's event loop. Calls go down: the node calls its streams, its scheduler and its
loop; a subclass says what is done to get a prompt's KV cache.
"""

from __future__ import annotations

import abc

from pdx.config.node import ServerConfig
from pdx.engine.decode_request import DecodeRequest
from pdx.engine.loading import LoadedModel
from pdx.engine.step_loop import StepLoop
from pdx.engine.streams import Frontend, Streams
from pdx.errors import CapacityError, RequestError
from pdx.metrics.trace import TraceWriter
from pdx.metrics.transfers import Transfers
from pdx.request.stream import Abort, FrontendReady, NodeStatus, Submit, TransfersAsked
from pdx.scheduler.passes import ScheduledPass
from pdx.scheduler.request import RequestUpdate

__all__ = ["ServingNode"]


class ServingNode(abc.ABC):
    """The loaded model stays the caller's, who closes it after ``stop``.

    Args:
        frontend: where requests come from; None: a process that serves HTTP.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        model_name: str,
        trace: TraceWriter | None = None,
        frontend: Frontend | None = None,
    ) -> None:
        self._loaded = loaded
        self._model_name = model_name
        self.scheduler = loaded.scheduler()
        self._loop = StepLoop(
            self.scheduler, loaded.ranks, self, watchdog_s=loaded.config.watchdog_s, trace=trace
        )
        self._streams = Streams(loaded, self.scheduler, trace, frontend)

    async def start_frontend(self, server: ServerConfig) -> FrontendReady:
        """Start the HTTP frontend.

        Raises:
            PdxError: it cannot start.
        """
        return await self._streams.start_frontend(server, self._model_name)

    async def drain(self) -> None:
        """Take nothing new; return when all that runs has ended."""
        await self._streams.drain()

    @abc.abstractmethod
    def status(self) -> NodeStatus:
        """The node's health, pages and queues."""

    @abc.abstractmethod
    def transfers(self) -> Transfers:
        """The node's transfers now."""

    async def _serve_frontend(self) -> None:
        """Do what the frontend asks, until cancelled.

        Raises:
            WorkerError: the frontend died.
        """
        while True:
            match await self._streams.receive():
                case Submit() as submit:
                    self._take(submit)
                case Abort() as abort:
                    if (request := self._streams.close(abort)) is not None:
                        self._on_left(request)
                case TransfersAsked() as asked:
                    self._streams.tell_transfers(asked, self.transfers())
            self._loop.wake()

    def _take(self, submit: Submit) -> None:
        try:
            if self._streams.is_draining:
                raise CapacityError("this node is draining", hint="send the request to another one")
            self._schedule(submit)
        except RequestError as error:
            self._streams.refuse(submit.stream_id, error)
        else:
            self._streams.open(submit)

    def _fail(self, request_id: int, error: RequestError) -> None:
        """End a request with an error."""
        self._streams.fail(request_id, error)
        self._loop.wake()

    @abc.abstractmethod
    def _schedule(self, submit: Submit) -> None:
        """Give the request to the scheduler.

        Raises:
            RequestError: it cannot be served.
        """

    @abc.abstractmethod
    def _on_left(self, request: DecodeRequest) -> None:
        """The client has left; the scheduler has forgotten the request."""

    # ---- Role of the step loop ------------------------------------------------------------

    @abc.abstractmethod
    def admit(self) -> None:
        """Start what can start."""

    @abc.abstractmethod
    def before_pass(self, scheduled: ScheduledPass) -> None:
        """A pass is about to run."""

    def after_pass(self, updates: list[RequestUpdate]) -> None:
        """A pass has run."""
        self._streams.send_updates(updates)
