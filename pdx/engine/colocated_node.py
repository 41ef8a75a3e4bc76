"""One node that does both phases behind an HTTP frontend: no peer, no fabric.

Runs on the primary's event loop, like the other nodes.
"""

from __future__ import annotations

from pdx.engine.decode_request import DecodeRequest
from pdx.engine.loading import LoadedModel
from pdx.engine.serving_node import ServingNode
from pdx.engine.streams import Frontend
from pdx.engine.tasks import fail_with_ranks, run_until_one_ends
from pdx.metrics.clock import now_s
from pdx.metrics.trace import TraceWriter
from pdx.metrics.transfers import Transfers
from pdx.request.stream import NodeStatus, Submit
from pdx.scheduler.passes import ScheduledPass
from pdx.scheduler.request import PromptScoring, RequestUpdate

__all__ = ["ColocatedNode"]


class ColocatedNode(ServingNode):
    """See :class:`ServingNode` for the arguments."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        model_name: str,
        trace: TraceWriter | None = None,
        frontend: Frontend | None = None,
    ) -> None:
        super().__init__(loaded, model_name=model_name, trace=trace, frontend=frontend)
        #: The pass that runs.
        self._scheduled: ScheduledPass | None = None
        self._pass_start_s = 0.0

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            PdxError: a process of the node failed; the node must stop.
        """
        await run_until_one_ends(
            self._loop.run(),
            fail_with_ranks(self._loaded.ranks),
            self._serve_frontend(),
            self._streams.report(self.status),
            self._streams.throughput.report(),
        )

    async def stop(self) -> None:
        """End the frontend."""
        await self._streams.stop()

    def status(self) -> NodeStatus:
        is_draining = self._streams.is_draining
        return NodeStatus(
            healthy=not is_draining,
            detail="draining" if is_draining else "ready",
            counts=self._streams.counts(),
        )

    def transfers(self) -> Transfers:
        return Transfers(live=[], recent=[])

    def _schedule(self, submit: Submit) -> None:
        num_top = submit.sampling.prompt_logprobs
        scoring = None if num_top is None else PromptScoring(num_top=num_top)
        self.scheduler.submit(
            submit.stream_id,
            submit.token_ids,
            submit.sampling,
            scoring,
            cache_salt=submit.cache_salt,
        )

    def _on_left(self, request: DecodeRequest) -> None:
        """Nobody else works for it."""

    def admit(self) -> None:
        for scheduled in self.scheduler.admit():
            self._streams.requests[scheduled.request_id].on_admitted(scheduled.num_cached)
            self.scheduler.start(scheduled.request_id)

    def before_pass(self, scheduled: ScheduledPass) -> None:
        self._scheduled, self._pass_start_s = scheduled, now_s()

    def after_pass(self, updates: list[RequestUpdate]) -> None:
        self._note_chunks()
        super().after_pass(updates)

    def _note_chunks(self) -> None:
        assert self._scheduled is not None
        for chunk in self._scheduled.chunks:
            request = self._streams.requests.get(chunk.request_id)
            if request is not None:
                request.on_own_chunk(chunk.end, self._pass_start_s, self._loop.last_pass_s)
