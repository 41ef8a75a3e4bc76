"""The decoder: takes requests from its frontend, asks the prefiller for their KV cache, and
generates.

Everything here runs on the primary's event loop. A request's pages are leased before the prefiller
is asked, and its slot is armed before the message leaves; the scheduler sees the request only when
the count is complete.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from dataclasses import dataclass

from pdx.config.node import ServerConfig
from pdx.engine.decode_request import DecodeRequest
from pdx.engine.frontend_bridge import FrontendBridge
from pdx.engine.loading import LoadedModel, mapped_memory
from pdx.engine.peer import PeerConnector
from pdx.engine.step_loop import StepLoop
from pdx.engine.transfer_log import TransferLog
from pdx.errors import CapacityError, InvalidRequest, RequestError
from pdx.fabric import FabricOptions
from pdx.kv.pages import Proof, Use
from pdx.messenger.actions import PrefillTimes
from pdx.messenger.control import Address
from pdx.messenger.decode_link import Arrival, DecodeLink
from pdx.messenger.fabric_hub import FabricHub
from pdx.messenger.handshake import FabricChoice, NodeIdentity
from pdx.messenger.messages import Prefill
from pdx.messenger.plan import atoms_by_rank, transfer_bytes
from pdx.messenger.slots import SlotTable
from pdx.metrics.trace import TraceWriter
from pdx.metrics.transfers import Transfers
from pdx.request.batch import ScoredToken
from pdx.request.stream import FrontendReady, NodeStatus, Submit
from pdx.scheduler.scheduler import ScheduledPass
from pdx.scheduler.sequence import Sequence, SequenceUpdate

__all__ = ["DecodeNode"]

logger = logging.getLogger(__name__)
_STATUS_S = 0.1


@dataclass(frozen=True, slots=True)
class _Transfer:
    request_id: int
    lease_id: int


class DecodeNode:
    """The loaded model stays the caller's, who closes it after :meth:`stop`."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        model_name: str,
        peer: Address,
        fabric: FabricChoice,
        trace: TraceWriter | None = None,
    ) -> None:
        self._loaded = loaded
        self._model_name = model_name
        self._identity = NodeIdentity(
            node=secrets.token_hex(8), manifest=loaded.manifest(), fabric=fabric
        )
        self._hub = FabricHub(mapped_memory(loaded), FabricOptions())
        self._slots = SlotTable()
        self.scheduler = loaded.scheduler()
        self._pool = self.scheduler.pool
        self._loop = StepLoop(
            self.scheduler, loaded.ranks, self, watchdog_s=loaded.config.watchdog_s, trace=trace
        )
        self.connector = PeerConnector(peer, self._hub, self._slots, self._identity, owner=self)
        self._bridge = FrontendBridge(loaded, self.scheduler, self, trace)
        self._transfers: dict[int, _Transfer] = {}
        self._log = TransferLog()
        self._next_transfer_id = itertools.count(1)

    async def start_frontend(self, server: ServerConfig) -> FrontendReady:
        """Start the HTTP frontend.

        Raises:
            PdxError: it cannot start.
        """
        return await self._bridge.start(server, self._model_name)

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            PdxError: a process of the node failed, or the peer refused us for good; the node must
            stop.
        """
        tasks = [
            asyncio.create_task(self._loop.run()),
            asyncio.create_task(self._watch_rank()),
            asyncio.create_task(self._bridge.serve()),
            asyncio.create_task(self._bridge.report(self.status)),
            asyncio.create_task(self.connector.run()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def stop(self, reason: str) -> None:
        """End the link, the frontend and the fabrics."""
        await self.connector.stop(reason)
        await self._bridge.stop()
        self._hub.close()

    # ---- StreamOwner ----------------------------------------------------------------------

    def submit(self, submit: Submit) -> None:
        """What the frontend cannot check: the peer's limits."""
        link = self.connector.link
        num_prefill = len(submit.token_ids) - 1
        if link is not None and link.usable and num_prefill > link.max_prompt_len:
            raise InvalidRequest(
                f"the prompt of {len(submit.token_ids)} tokens exceeds what the prefiller holds "
                f"({link.max_prompt_len})",
                param="prompt",
            )
        self.scheduler.submit(submit.stream_id, submit.token_ids, submit.sampling)

    def aborted(self, request: DecodeRequest) -> None:
        if request.transfer_id is not None and self.connector.link is not None:
            self._log.cancelled(request.transfer_id)
            self.connector.link.cancel(request.transfer_id)

    def wake(self) -> None:
        self._loop.wake()

    def transfers(self) -> Transfers:
        return self._log.views()

    # ---- Role -----------------------------------------------------------------------------

    def admit(self) -> None:
        link = self.connector.link
        if link is not None and not link.usable:
            link = None
        if link is None:
            self._refuse_new_requests()
        for sequence in self.scheduler.admit():
            request = self._bridge.requests[sequence.request_id]
            request.on_admitted()
            if link is None or self._starts_here(sequence, request, link):
                self.scheduler.start(sequence.request_id)
            else:
                self._dispatch(sequence, link)

    def _refuse_new_requests(self) -> None:
        """Without a prefiller only what needs none goes on: streams that were preempted, and
        prompts of one token.
        """
        error = CapacityError("no prefiller is connected", hint=self.connector.status)
        for sequence in self.scheduler.waiting():
            if len(sequence.token_ids) > 1 and not sequence.output_len:
                self._bridge.fail(sequence.request_id, error)

    @staticmethod
    def _starts_here(sequence: Sequence, request: DecodeRequest, link: DecodeLink) -> bool:
        """Nothing to prefill, or a stream whose prefiller has failed it or cannot hold it: its
        client has tokens already, so this node computes the rest of the cache itself.
        """
        num_prefill = len(sequence.token_ids) - 1
        if not num_prefill or request.prefill_here:
            return True
        return sequence.output_len > 0 and num_prefill > link.max_prompt_len

    def _dispatch(self, sequence: Sequence, link: DecodeLink) -> None:
        """Arm a slot and ask the prefiller for everything but the last token."""
        pair = self._slots.take()
        if pair is None or not link.usable:
            if pair is not None:
                self._slots.give_back(pair[0])
            self._bridge.fail(
                sequence.request_id, CapacityError("too many transfers are unsettled")
            )
            return
        src, dst = link.src_layout, self._loaded.layout
        assert src is not None
        lease_id = sequence.lease_id
        assert lease_id is not None
        num_tokens = len(sequence.token_ids) - 1
        pages = self._pool.page_indices(lease_id)[: dst.rank.num_pages_for(num_tokens)]
        transfer_id = next(self._next_transfer_id)
        self._transfers[transfer_id] = _Transfer(sequence.request_id, lease_id)
        self._pool.hold(lease_id, Use.REMOTE_WRITE)
        request = self._bridge.requests[sequence.request_id]
        num_bytes = transfer_bytes(src, dst, 0, num_tokens)
        request.dispatch(transfer_id, link, num_bytes)
        prefill = Prefill(
            transfer_id=transfer_id,
            token_ids=sequence.token_ids[:-1],
            first_position=0,
            page_indices=list(pages),
            slot=pair[0],
            generation=pair[1],
            atoms_by_rank=atoms_by_rank(src, dst, transfer_id, 0, num_tokens),
            prompt_logprobs=request.prompt_logprobs_wanted,
            last_token_id=sequence.token_ids[-1],
        )
        self._log.started(prefill, link, num_bytes)
        link.start(prefill)

    def before_pass(self, scheduled: ScheduledPass) -> None:
        """A decoder's passes concern nobody else."""

    def after_pass(self, updates: list[SequenceUpdate]) -> None:
        self._bridge.after_pass(updates)

    # ---- DecodeLinkOwner ------------------------------------------------------------------

    def transfer_settled(self, link: DecodeLink, transfer_id: int, proof: Proof) -> None:
        transfer = self._transfers.pop(transfer_id)
        self._log.settled(transfer_id, proof)
        self._pool.drop(transfer.lease_id, Use.REMOTE_WRITE, proof)
        self._loop.wake()

    def transfer_counted(self, link: DecodeLink, transfer_id: int, arrival: Arrival) -> None:
        self._request_of(transfer_id).on_arrived(arrival)

    def prompt_scored(self, link: DecodeLink, transfer_id: int, tokens: list[ScoredToken]) -> None:
        self._request_of(transfer_id).prompt_logprobs += tokens

    def transfer_ready(self, link: DecodeLink, transfer_id: int) -> None:
        request = self._request_of(transfer_id)
        request.on_ready()
        sequence = self.scheduler.sequence(request.request_id)
        assert sequence is not None
        self.scheduler.start(request.request_id, num_computed=len(sequence.token_ids) - 1)
        self._loop.wake()

    def transfer_lost(self, link: DecodeLink, transfer_id: int, error: RequestError) -> None:
        request = self._request_of(transfer_id)
        request.transfer_id = None
        self._log.lost(transfer_id, error.message)
        if request.output_len:
            request.prefill_here = True
            self.scheduler.requeue(request.request_id)
            self._loop.wake()
        else:
            self._bridge.fail(request.request_id, error)

    def prefill_times(self, link: DecodeLink, times: PrefillTimes) -> None:
        for request in self._bridge.requests.values():
            if times.transfer_id in (request.transfer_id, request.arrived_transfer_id):
                request.times = times

    def _request_of(self, transfer_id: int) -> DecodeRequest:
        return next(r for r in self._bridge.requests.values() if r.transfer_id == transfer_id)

    # ---- health ---------------------------------------------------------------------------

    async def _watch_rank(self) -> None:
        raise await self._loaded.ranks.died()

    def status(self) -> NodeStatus:
        """The node's health, pages and queues."""
        link = self.connector.link
        usable = link is not None and link.usable
        counts = self._bridge.counts() | {
            "transfers_open": len(self._transfers),
            "slots_taken": self._slots.num_taken,
            "atoms_counted": sum(fabric.atoms_reaped for fabric in self._hub.statistics()),
            "imms_stale": sum(fabric.stale_imms for fabric in self._hub.statistics()),
        }
        return NodeStatus(
            healthy=usable,
            detail="ready" if usable else self.connector.status,
            counts=counts,
        )
