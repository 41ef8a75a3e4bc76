"""The decoder: takes requests from its frontend, asks the prefiller for their KV cache, and
generates.

Everything here runs on the primary's event loop. A request's pages are leased before the prefiller
is asked, and its slot is armed before the message leaves; the scheduler sees the request only when
the count is complete.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, abc

from pdx.config.node import RecoveryConfig
from pdx.config.providers import FabricChoice
from pdx.engine.decode_request import DecodeRequest
from pdx.engine.loading import LoadedModel, mapped_memory
from pdx.engine.peer import PeerConnector
from pdx.engine.prefillers import Prefiller, Prefillers
from pdx.engine.recovery import Ask, Place, decide
from pdx.engine.serving_node import ServingNode
from pdx.engine.streams import Frontend
from pdx.engine.tasks import fail_with_ranks, run_until_one_ends
from pdx.engine.transfers import TransferTable
from pdx.errors import CapacityError, InvalidRequest, PdxError, RequestError
from pdx.fabric import FabricOptions, open_fabric
from pdx.kv.pages import Proof
from pdx.messenger.actions import PrefillTimes
from pdx.messenger.control import Address
from pdx.messenger.decode_link import Arrival, DecodeLink
from pdx.messenger.fabric_hub import FabricHub, FabricOpener
from pdx.messenger.handshake import NodeIdentity
from pdx.messenger.messages import Prefill
from pdx.messenger.plan import atoms_by_rank, transfer_bytes
from pdx.messenger.slots import SlotTable
from pdx.metrics.clock import now_s
from pdx.metrics.faults import Fault, fault_counts
from pdx.metrics.trace import TraceWriter
from pdx.metrics.transfers import Transfers
from pdx.request.batch import ScoredToken
from pdx.request.ids import IdArray
from pdx.request.stream import NodeStatus, Submit
from pdx.scheduler.passes import ScheduledPass
from pdx.scheduler.request import PromptScoring, Request

__all__ = ["DecodeNode"]

logger = logging.getLogger(__name__)
#: Between two looks at requests that wait for a prefiller.
_WAIT_STEP_S = 0.2


class DecodeNode(ServingNode):
    """See :class:`ServingNode` for the other arguments.

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
        super().__init__(loaded, model_name=model_name, trace=trace, frontend=frontend)
        self._identity = NodeIdentity(
            node=secrets.token_hex(8), manifest=loaded.manifest(), fabric=fabric, secret=secret
        )
        options = FabricOptions(cpu=fabric_cpu)
        self._hub = FabricHub(mapped_memory(loaded), options, fabric_bind, opener)
        self._slots = slots or SlotTable()
        self._pool = self.scheduler.pool
        self._local_below = local_below
        self._policy = recovery or RecoveryConfig()
        self.prefillers = Prefillers([self._prefiller(address) for address in peers])
        self._transfers = TransferTable(self._pool)
        self._waking: asyncio.TimerHandle | None = None
        #: Faults of transfers whose links went on.
        self._faults: Counter[Fault] = Counter()
        #: The fault that peers count when this node ends.
        self._own_fault: Fault | None = None

    def _prefiller(self, address: Address) -> Prefiller:
        def on_link(link: DecodeLink) -> None:
            prefiller.on_link(link)
            self._loop.wake()

        connector = PeerConnector(
            address, self._hub, self._slots, self._identity, owner=self, on_link=on_link
        )
        prefiller = Prefiller(connector, self._policy)
        return prefiller

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            PdxError: a process of the node failed, or no peer takes us; the node must stop.
        """
        try:
            await run_until_one_ends(
                self._loop.run(),
                fail_with_ranks(self._loaded.ranks),
                self._serve_frontend(),
                self._streams.report(self.status),
                self._streams.throughput.report(),
                self.prefillers.run(),
            )
        except PdxError:
            self._own_fault = Fault.PEER_FAILED
            raise

    async def stop(self, reason: str) -> None:
        """End the links, the frontend and the fabrics."""
        await self.prefillers.stop(reason, self._own_fault)
        await self._streams.stop()
        self._hub.close()

    # ---- requests -------------------------------------------------------------------------

    def _schedule(self, submit: Submit) -> None:
        most = self.prefillers.max_prompt_len
        if most is not None and len(submit.token_ids) - 1 > most:
            raise InvalidRequest(
                f"the prompt of {len(submit.token_ids)} tokens exceeds what the prefiller holds "
                f"({most})",
                param="prompt",
            )
        self.scheduler.submit(
            submit.stream_id, submit.token_ids, submit.sampling, cache_salt=submit.cache_salt
        )

    def _on_left(self, request: DecodeRequest) -> None:
        transfer = request.transfer
        if transfer is not None and not transfer.is_decided:
            self._transfers.cancel(transfer)
            # Also of one that is settled: the prompt's scores may still be on their way.
            transfer.link.cancel(transfer.transfer_id)

    def transfers(self) -> Transfers:
        return self._transfers.views()

    # ---- where a prompt's KV cache comes from ---------------------------------------------

    def admit(self) -> None:
        to_wait: list[int] = []
        for scheduled in self.scheduler.admit(self._held()):
            request = self._streams.requests[scheduled.request_id]
            request.on_admitted(scheduled.num_cached)
            if self._starts_here(scheduled):
                self.scheduler.start(request.request_id)
                continue
            match self._decide(scheduled, request):
                case Ask(prefiller=prefiller):
                    if not self._ask(prefiller, scheduled, request):
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

    def before_pass(self, scheduled: ScheduledPass) -> None:
        """A decoder's passes concern nobody else."""

    def _held(self) -> set[int]:
        """Waiting requests that only a prefiller can serve, while none is trusted; those that have
        waited for too long fail. And those for a prefiller, until transfers give slots back.
        """
        held: set[int] = set()
        needs_slot = not self._slots.any_free
        if not needs_slot and (self._policy.local_fallback or self.prefillers.any_trusted):
            return held
        for scheduled in self.scheduler.waiting():
            request = self._streams.requests[scheduled.request_id]
            if len(scheduled.token_ids) <= max(1, self._local_below):
                continue
            match self._decide(scheduled, request):
                case Ask() if needs_slot:
                    held.add(request.request_id)
                case Place.WAIT:
                    self._note_wait(request)
                    held.add(request.request_id)
                case Place.GIVE_UP:
                    self._give_up(request)
        return held

    def _decide(self, scheduled: Request, request: DecodeRequest) -> Ask[Prefiller] | Place:
        since_s = request.waiting_since_s
        return decide(
            self._policy,
            self.prefillers.candidates(len(scheduled.token_ids) - 1),
            failed=request.failed_prefillers,
            has_begun=scheduled.output_len > 0,
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
        reason = many if self.prefillers.links else "no prefiller is connected"
        error = request.last_error or CapacityError(reason, hint=self.prefillers.status)
        self._fail(request.request_id, error)

    def _prefill_here(self, request: DecodeRequest) -> None:
        """Do a prefiller's work on this node."""
        self._streams.counters["prefills_here"] += 1
        num_top = request.prompt_logprobs_wanted
        scoring = None if num_top is None else PromptScoring(num_top=num_top)
        self.scheduler.start(request.request_id, scoring=scoring)

    def _starts_here(self, scheduled: Request) -> bool:
        """Whether it needs no prefiller: what is missing of its cache is no more than a part of its
        last page, or fewer tokens than the threshold.
        """
        num_prefill = len(scheduled.token_ids) - 1
        if not num_prefill:
            return True
        if not scheduled.may_share:  # its prompt is scored
            return False
        if num_prefill - scheduled.num_cached < self._local_below:
            return True
        return self.scheduler.lacks_one_page_at_most(scheduled)

    def _ask(self, prefiller: Prefiller, scheduled: Request, request: DecodeRequest) -> bool:
        """Arm a slot and ask the prefiller for all that the cache lacks, but for the last token.
        False: no slot is free; one that comes back wakes the loop.
        """
        link, lease_id = prefiller.link, scheduled.lease_id
        assert link is not None and link.src_layout is not None and lease_id is not None
        pair = self._slots.take()
        if pair is None:
            return False
        src, dst = link.src_layout, self._loaded.layout
        first, end = scheduled.num_cached, len(scheduled.token_ids) - 1
        pages = self._pool.page_indices(lease_id)[: dst.rank.num_pages_for(end)]
        transfer = self._transfers.start(
            request,
            prefiller,
            link,
            lease_id=lease_id,
            num_tokens=end,
            num_asked=end - first,
            num_bytes=transfer_bytes(src, dst, first, end),
        )
        prefill = Prefill(
            transfer_id=transfer.transfer_id,
            token_ids=IdArray(scheduled.token_ids[:-1]),
            first_position=first,
            page_indices=IdArray(pages[first // dst.rank.page_size :]),
            slot=pair[0],
            generation=pair[1],
            atoms_by_rank=atoms_by_rank(src, dst, transfer.transfer_id, first, end),
            prompt_logprobs=request.prompt_logprobs_wanted,
            last_token_id=scheduled.token_ids[-1],
            cache_salt=scheduled.cache_salt,
            names=request.names,
        )
        transfer.atoms = prefill.atoms
        self._streams.counters["prefills_asked"] += 1
        link.start_transfer(prefill)
        return True

    # ---- DecodeLinkOwner ------------------------------------------------------------------

    def transfer_settled(self, link: DecodeLink, transfer_id: int, proof: Proof) -> None:
        self._transfers.settle(transfer_id, proof)
        self._loop.wake()

    def prefix_found(self, link: DecodeLink, transfer_id: int, num_tokens: int) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.request is not None:
            transfer.request.on_prefix_found(num_tokens)

    def transfer_counted(self, link: DecodeLink, transfer_id: int, arrival: Arrival) -> None:
        self._transfers.arrive(transfer_id, arrival)

    def prompt_scored(self, link: DecodeLink, transfer_id: int, tokens: list[ScoredToken]) -> None:
        self._transfers.listener(transfer_id).prompt_logprobs += tokens

    def transfer_ready(self, link: DecodeLink, transfer_id: int) -> None:
        request = self._transfers.ready(transfer_id)
        num_computed = len(self._scheduled(request).token_ids) - 1
        self.scheduler.start(request.request_id, num_computed=num_computed)
        self._loop.wake()

    def transfer_lost(
        self, link: DecodeLink, transfer_id: int, error: RequestError, fault: Fault | None
    ) -> None:
        if fault is not None:
            self._faults[fault] += 1
        is_its_own_fault = error.http_status < 500
        request = self._transfers.lose(transfer_id, error, is_its_own_fault=is_its_own_fault)
        logger.info("%s: no KV cache came from %s: %s", request.names, link.peer, error.message)
        if not request.output_len and (
            is_its_own_fault or self._decide(self._scheduled(request), request) is Place.GIVE_UP
        ):
            self._fail(request.request_id, error)
            return
        self._streams.counters["prefills_retried"] += 1
        self.scheduler.requeue(request.request_id)
        self._loop.wake()

    def prefill_times(self, link: DecodeLink, times: PrefillTimes) -> None:
        counters = self._streams.counters
        if times.transfer_outlasts_prefill:
            counters["transfers_outlasting_prefills"] += 1
            if counters["transfers_outlasting_prefills"] == 1:
                logger.warning(
                    "a transfer from %s took longer than its prefill: where that is the rule, "
                    "--local-below lets this node compute short prompts itself",
                    link.peer,
                )
        if (transfer := self._transfers.get(times.transfer_id)) is not None:
            transfer.times = times

    def _scheduled(self, request: DecodeRequest) -> Request:
        """The request as the scheduler has it, with its pages."""
        scheduled = self.scheduler.request(request.request_id)
        assert scheduled is not None
        return scheduled

    # ---- health ---------------------------------------------------------------------------

    def status(self) -> NodeStatus:
        """The node's health, pages and queues."""
        is_linked = bool(self.prefillers.links)
        fabrics = self._hub.statistics()
        counts = self._streams.counts() | {
            "transfers_open": self._transfers.num_unsettled,
            "prefillers": len(self.prefillers.links),
            **fault_counts(self.prefillers.faults + self._faults),
            "breakers_opened": self.prefillers.num_breakers_opened,
            "slots_taken": self._slots.num_taken,
            "atoms_counted": sum(fabric.atoms_reaped for fabric in fabrics),
            "imms_read": sum(fabric.imms_reaped for fabric in fabrics),
            "imms_stale": sum(fabric.stale_imms for fabric in fabrics),
        }
        if self._streams.is_draining:
            return NodeStatus(healthy=False, detail="draining", counts=counts)
        if is_linked:
            return NodeStatus(healthy=True, detail="ready", counts=counts)
        here, detail = self._policy.local_fallback, self.prefillers.status
        if here:
            detail = f"prompts are prefilled here: {detail}"
        return NodeStatus(healthy=here, detail=detail, counts=counts)
