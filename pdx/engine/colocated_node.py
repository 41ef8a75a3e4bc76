"""One node that does both phases behind an HTTP frontend: no peer, no fabric.

Runs on the primary's event loop, like the other nodes.
"""

from __future__ import annotations

from pdx.config.node import ServerConfig
from pdx.engine.decode_request import DecodeRequest
from pdx.engine.frontend_bridge import Frontend, FrontendBridge
from pdx.engine.loading import LoadedModel
from pdx.engine.step_loop import StepLoop
from pdx.engine.tasks import fail_with_ranks, run_until_one_ends
from pdx.metrics.clock import now_s
from pdx.metrics.trace import TraceWriter
from pdx.metrics.transfers import Transfers
from pdx.request.stream import FrontendReady, NodeStatus, Submit
from pdx.scheduler.passes import ScheduledPass
from pdx.scheduler.request import PromptScoring, RequestUpdate

__all__ = ["ColocatedNode"]


class ColocatedNode:
    """The loaded model stays the caller's, who closes it after :meth:`stop`.

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
        self._bridge = FrontendBridge(loaded, self.scheduler, self, trace, frontend)
        #: The pass that runs.
        self._scheduled: ScheduledPass | None = None
        self._pass_start_s = 0.0

    async def start_frontend(self, server: ServerConfig) -> FrontendReady:
        """Start the HTTP frontend.

        Raises:
            PdxError: it cannot start.
        """
        return await self._bridge.start(server, self._model_name)

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            PdxError: a process of the node failed; the node must stop.
        """
        await run_until_one_ends(
            self._loop.run(),
            fail_with_ranks(self._loaded.ranks),
            self._bridge.serve(),
            self._bridge.report(self.status),
            self._bridge.throughput.report(),
        )

    async def drain(self) -> None:
        """Take nothing new; return when all that runs has ended."""
        await self._bridge.drain()

    async def stop(self) -> None:
        """End the frontend."""
        await self._bridge.stop()

    def status(self) -> NodeStatus:
        """The node's health, pages and queues."""
        is_draining = self._bridge.is_draining
        return NodeStatus(
            healthy=not is_draining,
            detail="draining" if is_draining else "ready",
            counts=self._bridge.counts(),
        )

    # ---- StreamOwner ----------------------------------------------------------------------

    def submit(self, submit: Submit) -> None:
        num_top = submit.sampling.prompt_logprobs
        scoring = None if num_top is None else PromptScoring(num_top=num_top)
        self.scheduler.submit(
            submit.stream_id,
            submit.token_ids,
            submit.sampling,
            scoring,
            cache_salt=submit.cache_salt,
        )

    def aborted(self, request: DecodeRequest) -> None:
        """Nobody else works for it."""

    def wake(self) -> None:
        self._loop.wake()

    def transfers(self) -> Transfers:
        return Transfers(live=[], recent=[])

    # ---- Role -----------------------------------------------------------------------------

    def admit(self) -> None:
        for sequence in self.scheduler.admit():
            self._bridge.requests[sequence.request_id].on_admitted(sequence.num_cached)
            self.scheduler.start(sequence.request_id)

    def before_pass(self, scheduled: ScheduledPass) -> None:
        self._scheduled, self._pass_start_s = scheduled, now_s()

    def after_pass(self, updates: list[RequestUpdate]) -> None:
        self._note_chunks()
        self._bridge.after_pass(updates)

    def _note_chunks(self) -> None:
        assert self._scheduled is not None
        for chunk in self._scheduled.chunks:
            request = self._bridge.requests.get(chunk.request_id)
            if request is not None:
                request.on_own_chunk(chunk.end, self._pass_start_s, self._loop.last_pass_s)
