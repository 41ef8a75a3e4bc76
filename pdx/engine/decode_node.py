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
from collections import Counter, abc

from pdx.config.node import RecoveryConfig, ServerConfig
from pdx.engine.decode_request import DecodeRequest
from pdx.engine.frontend_bridge import Frontend, FrontendBridge
from pdx.engine.loading import LoadedModel, mapped_memory
from pdx.engine.peer import PeerConnector
from pdx.engine.peers import Peers
from pdx.engine.recovery import Ask, Decision, Place, decide
from pdx.engine.step_loop import StepLoop
from pdx.engine.tasks import fail_with_ranks, run_until_one_ends
from pdx.engine.transfer_log import TransferLog
from pdx.errors import CapacityError, InvalidRequest, PdxError, RequestError
from pdx.fabric import FabricOptions, open_fabric
from pdx.kv.pages import Proof, Use
from pdx.messenger.actions import PrefillTimes
from pdx.messenger.control import Address
from pdx.messenger.decode_link import Arrival, DecodeLink
from pdx.messenger.fabric_hub import FabricHub, FabricOpener
from pdx.messenger.handshake import FabricChoice, NodeIdentity
from pdx.messenger.plan import atoms_by_rank, transfer_bytes
from pdx.messenger.slots import SlotTable
from pdx.metrics.clock import now_s
from pdx.metrics.faults import Fault, fault_counts
from pdx.metrics.trace import TraceWriter
from pdx.metrics.transfers import Transfers
from pdx.request.batch import ScoredToken
from pdx.request.stream import FrontendReady, NodeStatus, Submit
from pdx.scheduler.passes import ScheduledPass
from pdx.scheduler.request import PromptScoring, Request, RequestUpdate

__all__ = ["DecodeNode"]

logger = logging.getLogger(__name__)
#: Between two looks at requests that wait for a prefiller.
_WAIT_STEP_S = 0.2


class DecodeNode:
    """The loaded model stays the caller's, who closes it after :meth:`stop`.

    Args:
        opener, frontend, slots: what a simulation replaces.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        model_name: str,
        peers: abc.Sequence[Address],
        fabric: FabricChoice,
        fabric_cpu: int | None = None,
        fabric_bind: abc.Sequence[str] = (),
        secret: bytes | None = None,
        local_below: int = 0,
        recovery: RecoveryConfig | None = None,
        trace: TraceWriter | None = None,
        opener: FabricOpener = open_fabric,
        frontend: Frontend | None = None,
        slots: SlotTable | None = None,
    ) -> None:
        self._loaded = loaded
        self._model_name = model_name
        self._identity = NodeIdentity(
            node=secrets.token_hex(8), manifest=loaded.manifest(), fabric=fabric, secret=secret
        )
        options = FabricOptions(cpu=fabric_cpu)
        self._hub = FabricHub(mapped_memory(loaded), options, fabric_bind, opener)
        self._slots = slots or SlotTable()
        self.scheduler = loaded.scheduler()
        self._pool = self.scheduler.pool
        self._loop = StepLoop(
            self.scheduler, loaded.ranks, self, watchdog_s=loaded.config.watchdog_s, trace=trace
        )
        self._local_below = local_below
        self._policy = recovery or RecoveryConfig()
        self.peers = Peers([self._connector(address) for address in peers], self._policy)
        self._bridge = FrontendBridge(loaded, self.scheduler, self, trace, frontend)
        #: Leases of transfers that are not settled.
        self._transfers: dict[int, int] = {}
        self._waking: asyncio.TimerHandle | None = None
        self._log = TransferLog()
        #: Of transfers whose links went on.
        self._faults: Counter[Fault] = Counter()
        #: What peers count when this node ends.
        self._own_fault: Fault | None = None
        self._next_transfer_id = itertools.count(1)

    def _connector(self, address: Address) -> PeerConnector:
        def on_link(connector: PeerConnector) -> None:
            self.peers.linked(connector)
            self._loop.wake()

        return PeerConnector(
            address, self._hub, self._slots, self._identity, owner=self, on_link=on_link
        )

    async def start_frontend(self, server: ServerConfig) -> FrontendReady:
        """Start the HTTP frontend.

        Raises:
            PdxError: it cannot start.
        """
        return await self._bridge.start(server, self._model_name)

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            PdxError: a process of the node failed, or no peer takes us; the node must stop.
        """
        try:
            await run_until_one_ends(
                self._loop.run(),
                fail_with_ranks(self._loaded.ranks),
                self._bridge.serve(),
                self._bridge.report(self.status),
                self._bridge.throughput.report(),
                self.peers.run(),
            )
        except PdxError:
            self._own_fault = Fault.PEER_FAILED
            raise

    async def drain(self) -> None:
        """Take nothing new; return when all that runs has ended."""
        await self._bridge.drain()

    async def stop(self, reason: str) -> None:
        """End the links, the frontend and the fabrics."""
        await self.peers.stop(reason, self._own_fault)
        await self._bridge.stop()
        self._hub.close()

    # ---- StreamOwner ----------------------------------------------------------------------

    def submit(self, submit: Submit) -> None:
        """What the frontend cannot check: the peer's limits."""
        most = self.peers.max_prompt_len
        if most is not None and len(submit.token_ids) - 1 > most:
            raise InvalidRequest(
                f"the prompt of {len(submit.token_ids)} tokens exceeds what the prefiller holds "
                f"({most})",
                param="prompt",
            )
        self.scheduler.submit(
            submit.stream_id, submit.token_ids, submit.sampling, cache_salt=submit.cache_salt
        )

    def aborted(self, request: DecodeRequest) -> None:
        transfer_id = request.transfer_id
        if transfer_id is None:
            return
        assert request.prefiller_idx is not None and request.link is not None
        self.peers.aborted(request.prefiller_idx)
        self._log.cancelled(transfer_id)
        # Also of one that is settled: the prompt's scores may still be on their way.
        request.link.cancel(transfer_id)

    def wake(self) -> None:
        self._loop.wake()

    def transfers(self) -> Transfers:
        return self._log.views()

    # ---- Role -----------------------------------------------------------------------------

    def admit(self) -> None:
        to_wait: list[int] = []
        for sequence in self.scheduler.admit(self._held()):
            request = self._bridge.requests[sequence.request_id]
            request.on_admitted(sequence.num_cached)
            if self._starts_here(sequence):
                self.scheduler.start(sequence.request_id)
                continue
            match self._decide(sequence, request):
                case Ask(idx=idx):
                    if not self._dispatch(sequence, request, idx):
                        to_wait.append(request.request_id)
                case Place.HERE:
                    self._prefill_here(request)
                case Place.WAIT:
                    self._note_wait(request)
                    to_wait.append(request.request_id)
                case Place.GIVE_UP:
                    self._give_up(request)
        for request_id in reversed(to_wait):  # each becomes the first in the queue
            self.scheduler.requeue(request_id)

    def _held(self) -> set[int]:
        """Waiting requests that only a prefiller can serve, while none is trusted; those that have
        waited for too long fail. And those for a prefiller, until transfers give slots back.
        """
        held: set[int] = set()
        needs_slot = not self._slots.any_free
        if not needs_slot and (self._policy.local_fallback or self.peers.any_trusted):
            return held
        for sequence in self.scheduler.waiting():
            request = self._bridge.requests[sequence.request_id]
            if len(sequence.token_ids) <= max(1, self._local_below):
                continue
            match self._decide(sequence, request):
                case Ask() if needs_slot:
                    held.add(request.request_id)
                case Place.WAIT:
                    self._note_wait(request)
                    held.add(request.request_id)
                case Place.GIVE_UP:
                    self._give_up(request)
        return held

    def _decide(self, sequence: Request, request: DecodeRequest) -> Decision:
        since_s = request.waiting_since_s
        return decide(
            self._policy,
            self.peers.views(len(sequence.token_ids) - 1),
            failed=request.failed_prefillers,
            has_begun=sequence.output_len > 0,
            waited_s=0.0 if since_s is None else now_s() - since_s,
        )

    def _note_wait(self, request: DecodeRequest) -> None:
        if request.waiting_since_s is None:
            request.waiting_since_s = now_s()
        if self._waking is None:
            self._waking = asyncio.get_running_loop().call_later(_WAIT_STEP_S, self._wake_waiting)

    def _wake_waiting(self) -> None:
        self._waking = None
        self._loop.wake()

    def _give_up(self, request: DecodeRequest) -> None:
        many = "too many prompts fail at the prefillers"
        reason = many if self.peers.links else "no prefiller is connected"
        error = request.last_error or CapacityError(reason, hint=self.peers.status)
        self._bridge.fail(request.request_id, error)

    def _prefill_here(self, request: DecodeRequest) -> None:
        """Do a prefiller's work on this node."""
        self._bridge.counters["prefills_here"] += 1
        num_top = request.prompt_logprobs_wanted
        scoring = None if num_top is None else PromptScoring(num_top=num_top)
        self.scheduler.start(request.request_id, scoring=scoring)

    def _starts_here(self, sequence: Request) -> bool:
        """Whether it needs no prefiller: what is missing of its cache is no more than a part of its
        last page, or fewer tokens than the threshold.
        """
        num_prefill = len(sequence.token_ids) - 1
        if not num_prefill:
            return True
        if not sequence.may_share:  # its prompt is scored
            return False
        if num_prefill - sequence.num_cached < self._local_below:
            return True
        return self.scheduler.lacks_one_page_at_most(sequence)

    def _dispatch(self, sequence: Request, request: DecodeRequest, idx: int) -> bool:
        """Arm a slot and ask the prefiller for everything but the last token. False: no slot is
        free; one that comes back wakes the loop.
        """
        link = self.peers.link(idx)
        assert link is not None
        pair = self._slots.take()
        if pair is None:
            return False
        src, dst = link.src_layout, self._loaded.layout
        assert src is not None
        lease_id = sequence.lease_id
        assert lease_id is not None
        num_tokens = len(sequence.token_ids) - 1
        first = sequence.num_cached
        pages = self._pool.page_indices(lease_id)[: dst.rank.num_pages_for(num_tokens)]
        transfer_id = next(self._next_transfer_id)
        self._transfers[transfer_id] = lease_id
        self._pool.hold(lease_id, Use.REMOTE_WRITE)
        num_bytes = transfer_bytes(src, dst, first, num_tokens)
        request.dispatch(transfer_id, idx, link, num_bytes)
        prefill = request.prefill_of(
            sequence,
            pair,
            pages=pages[first // dst.rank.page_size :],
            atoms_by_rank=atoms_by_rank(src, dst, transfer_id, first, num_tokens),
        )
        self._bridge.counters["prefills_asked"] += 1
        self.peers.asked(idx, transfer_id, link, num_tokens - first)
        self._log.started(prefill, link, num_bytes)
        link.start(prefill)
        return True

    def before_pass(self, scheduled: ScheduledPass) -> None:
        """A decoder's passes concern nobody else."""

    def after_pass(self, updates: list[RequestUpdate]) -> None:
        self._bridge.after_pass(updates)

    # ---- DecodeLinkOwner ------------------------------------------------------------------

    def transfer_settled(self, link: DecodeLink, transfer_id: int, proof: Proof) -> None:
        lease_id = self._transfers.pop(transfer_id)
        self.peers.over(transfer_id)
        self._log.settled(transfer_id, proof)
        self._pool.drop(lease_id, Use.REMOTE_WRITE, proof)
        self._loop.wake()

    def prefix_found(self, link: DecodeLink, transfer_id: int, num_tokens: int) -> None:
        if (request := self._told_of(transfer_id)) is not None:
            request.on_prefix_found(num_tokens)

    def transfer_counted(self, link: DecodeLink, transfer_id: int, arrival: Arrival) -> None:
        self._request_of(transfer_id).on_arrived(arrival)

    def prompt_scored(self, link: DecodeLink, transfer_id: int, tokens: list[ScoredToken]) -> None:
        self._request_of(transfer_id).prompt_logprobs += tokens

    def transfer_ready(self, link: DecodeLink, transfer_id: int) -> None:
        request = self._request_of(transfer_id)
        request.on_ready()
        assert request.prefiller_idx is not None
        self.peers.succeeded(request.prefiller_idx)
        sequence = self.scheduler.request(request.request_id)
        assert sequence is not None
        self.scheduler.start(request.request_id, num_computed=len(sequence.token_ids) - 1)
        self._loop.wake()

    def transfer_lost(
        self, link: DecodeLink, transfer_id: int, error: RequestError, fault: Fault | None
    ) -> None:
        if fault is not None:
            self._faults[fault] += 1
        request = self._request_of(transfer_id)
        logger.info("%s: no KV cache came from %s: %s", request.names, link.peer, error.message)
        request.on_lost(error)
        self._log.lost(transfer_id, error.message)
        assert request.prefiller_idx is not None
        is_its_own_fault = error.http_status < 500
        if not is_its_own_fault:
            self.peers.failed(request.prefiller_idx)
        sequence = self.scheduler.request(request.request_id)
        assert sequence is not None
        if not request.output_len and (
            is_its_own_fault or self._decide(sequence, request) is Place.GIVE_UP
        ):
            self._bridge.fail(request.request_id, error)
            return
        self._bridge.counters["prefills_retried"] += 1
        self.scheduler.requeue(request.request_id)
        self._loop.wake()

    def prefill_times(self, link: DecodeLink, times: PrefillTimes) -> None:
        if times.transfer_outlasts_prefill:
            self._bridge.counters["transfers_outlasting_prefills"] += 1
            if self._bridge.counters["transfers_outlasting_prefills"] == 1:
                logger.warning(
                    "a transfer from %s took longer than its prefill: where that is the rule, "
                    "--local-below lets this node compute short prompts itself",
                    link.peer,
                )
        if (request := self._told_of(times.transfer_id)) is not None:
            request.times = times

    def _request_of(self, transfer_id: int) -> DecodeRequest:
        return next(r for r in self._bridge.requests.values() if r.transfer_id == transfer_id)

    def _told_of(self, transfer_id: int) -> DecodeRequest | None:
        """Whose transfer it is, or was; None where the request has ended."""
        requests = self._bridge.requests.values()
        own = (r for r in requests if transfer_id in (r.transfer_id, r.arrived_transfer_id))
        return next(own, None)

    # ---- health ---------------------------------------------------------------------------

    def status(self) -> NodeStatus:
        """The node's health, pages and queues."""
        is_linked = bool(self.peers.links)
        fabrics = self._hub.statistics()
        counts = self._bridge.counts() | {
            "transfers_open": len(self._transfers),
            "prefillers": len(self.peers.links),
            **fault_counts(self.peers.faults + self._faults),
            "breakers_opened": self.peers.num_breakers_opened,
            "slots_taken": self._slots.num_taken,
            "atoms_counted": sum(fabric.atoms_reaped for fabric in fabrics),
            "imms_read": sum(fabric.imms_reaped for fabric in fabrics),
            "imms_stale": sum(fabric.stale_imms for fabric in fabrics),
        }
        if self._bridge.is_draining:
            return NodeStatus(healthy=False, detail="draining", counts=counts)
        if is_linked:
            return NodeStatus(healthy=True, detail="ready", counts=counts)
        here = self._policy.local_fallback
        detail = f"prompts are prefilled here: {self.peers.status}" if here else self.peers.status
        return NodeStatus(healthy=here, detail=detail, counts=counts)
