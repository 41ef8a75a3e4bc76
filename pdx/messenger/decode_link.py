"""A decoder's side of one link: the driver that connects its state machine to socket, fabric and
engine.

Runs on the primary's event loop. See prefill_link for how a link ends; here the fence is what lets
quarantined pages go.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdx.errors import PeerLost, ProtocolError, RequestError
from pdx.fabric import Arrived, FabricEvent, Fenced, LinkDown, LinkUp, Surplus
from pdx.fabric.descriptor import hosts
from pdx.kv.layout import NodeLayout
from pdx.kv.pages import Proof
from pdx.messenger.actions import (
    Cached,
    Counted,
    DecodeAction,
    EndLink,
    Expect,
    Lost,
    PrefillTimes,
    Ready,
    Release,
    Retarget,
    Scores,
    Send,
    Settled,
)
from pdx.messenger.control import ControlConnection
from pdx.messenger.data_path import DataPath, may_heal
from pdx.messenger.decode_side import DecodeSide, TransferTimeouts
from pdx.messenger.fabric_hub import FabricHub, FabricLink
from pdx.messenger.link_end import LinkEnd, fault_of_error, fault_of_link_down
from pdx.messenger.messages import ControlMessage, Draining, Goodbye, Prefill, Welcome
from pdx.messenger.slots import SlotTable
from pdx.metrics.clock import now_s
from pdx.metrics.faults import Fault
from pdx.request.batch import ScoredToken

__all__ = ["Arrival", "DecodeLink", "DecodeLinkOwner"]

logger = logging.getLogger(__name__)
_TICK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """When a transfer's atoms came in: ``atoms[i]`` in total had been counted at ``ns[i]``
    (CLOCK_MONOTONIC).
    """

    ns: NDArray[np.int64]
    atoms: NDArray[np.uint32]


class DecodeLinkOwner(Protocol):
    """What a link tells the engine."""

    def transfer_settled(self, link: DecodeLink, transfer_id: int, proof: Proof) -> None:
        """No write of the transfer can come any more."""

    def prefix_found(self, link: DecodeLink, transfer_id: int, num_tokens: int) -> None:
        """The prefiller had the first tokens in its prefix cache."""

    def transfer_counted(self, link: DecodeLink, transfer_id: int, arrival: Arrival) -> None:
        """The KV cache is here, complete."""

    def transfer_ready(self, link: DecodeLink, transfer_id: int) -> None:
        """All that the request waited for is here; it may start."""

    def transfer_lost(
        self, link: DecodeLink, transfer_id: int, error: RequestError, fault: Fault | None
    ) -> None:
        """The KV cache will not come; ``fault`` is to be counted for that, if any."""

    def prompt_scored(self, link: DecodeLink, transfer_id: int, tokens: list[ScoredToken]) -> None:
        """Scores of the prompt's next tokens; all of them come before transfer_ready."""

    def prefill_times(self, link: DecodeLink, times: PrefillTimes) -> None:
        """When the prefiller worked on a transfer."""


class DecodeLink:
    """See the module's docstring. ``up`` is set when a real write has gone each way."""

    def __init__(
        self,
        *,
        connection: ControlConnection,
        hub: FabricHub,
        slots: SlotTable,
        owner: DecodeLinkOwner,
        timeouts: TransferTimeouts,
    ) -> None:
        self.peer = connection.peer
        self.up = asyncio.Event()
        self.ended = asyncio.Event()
        self.over = asyncio.Event()
        self._end: LinkEnd | None = None
        #: The prefiller takes no new prompts.
        self.is_draining = False
        self.same_host = False
        #: Random identity of the prefiller's process.
        self.peer_node = ""
        self.max_prompt_len = 0
        #: The prefiller's KV memory, once attached.
        self.src_layout: NodeLayout | None = None
        self._connection = connection
        self._hub = hub
        self._owner = owner
        self._side = DecodeSide(slots, timeouts)
        self._started = asyncio.Event()
        self._fabric_link: FabricLink | None = None
        self._receiving: asyncio.Task[None] | None = None
        #: Where the two data addresses are; None before they are known.
        self.data_path: DataPath | None = None
        #: It ended because no write got through, and would again.
        self.lacks_data_path = False
        #: When the atoms came of the Arrived event that is being handled.
        self._arrival: Arrival | None = None

    @property
    def provider(self) -> str:
        return "" if self._fabric_link is None else self._fabric_link.provider

    @property
    def end_reason(self) -> str | None:
        """Why it has ended, for people; None: it has not."""
        return None if self._end is None else self._end.reason

    @property
    def fault(self) -> Fault | None:
        """What is counted for its end, once it is over; None: it ended on purpose."""
        return None if self._end is None else self._end.fault

    @property
    def num_open(self) -> int:
        """Transfers that are not settled."""
        return self._side.num_open

    @property
    def usable(self) -> bool:
        """New transfers may start."""
        return self.up.is_set() and self.end_reason is None and not self.is_draining

    def atoms_landed(self, transfer_id: int) -> int:
        """Atoms of an unsettled transfer that have been counted so far; 0 once the link has ended,
        when no count means anything.
        """
        pair = self._side.pair_of(transfer_id)
        if pair is None or self._fabric_link is None or self.end_reason is not None:
            return 0
        return self._fabric_link.fabric.count(*pair)

    def attach(self, welcome: Welcome, link: FabricLink, *, same_host: bool) -> None:
        """Point our endpoint at the peer's; ``up`` follows when the data path is proved.

        Raises:
            FabricError: the peer's descriptor is not one.
        """
        self._fabric_link = link
        self.same_host = same_host
        self.peer_node = welcome.node
        self.max_prompt_len = welcome.max_prompt_len
        self.src_layout = welcome.manifest.layout()
        self.data_path = DataPath(
            own_role="decoder",
            peer_role="prefiller",
            own_hosts=hosts(link.fabric.descriptor(link.link)),
            peer_hosts=hosts(welcome.descriptor),
            own_control_host=self._connection.local_host,
            peer_control_host=self._connection.peer_host,
        )
        link.fabric.connect(link.link, welcome.descriptor)
        # While the data path is proved too: the prefiller may find first that there is none.
        self._receiving = asyncio.create_task(self._receive())

    async def run(self) -> None:
        """Serve the link, once attached, until it ends; returns once it is fenced."""
        assert self._receiving is not None
        ticker = asyncio.create_task(self._tick())
        await self._receiving
        ticker.cancel()
        await self._connection.close()
        await self.over.wait()

    async def _receive(self) -> None:
        try:
            while self._end is None:
                message = await self._connection.receive()
                if self._end is None:
                    self._on_message(message)
                if self._end is not None:
                    self._end.hear(message)
        except (PeerLost, ProtocolError) as error:
            self.end(error.message, fault_of_error(error))
        assert self._end is not None
        await self._end.await_last_word(self._connection)

    def _on_message(self, message: ControlMessage) -> None:
        match message:
            case Goodbye(reason=reason, fault=fault):
                self.lacks_data_path = message.no_data_path
                said = "says" if message.no_data_path else "said goodbye"
                self.end(f"the prefiller {said}: {reason}", fault)
            case Draining():
                self.is_draining = True
                self._leave_if_drained()
            case _:
                self._apply(self._side.on_message(message, now_s()))

    def _leave_if_drained(self) -> None:
        if self.is_draining and self._side.is_idle:
            self.end("the prefiller drains", None)

    def start_transfer(self, prefill: Prefill) -> None:
        """Begin a transfer; its slot was taken from the node's table."""
        assert self.usable
        self._apply(self._side.start_transfer(prefill))
        self._started.set()

    def cancel(self, transfer_id: int) -> None:
        """The engine does not want a transfer any more; it is settled later."""
        self._apply(self._side.cancel(transfer_id, now_s()))

    def end(self, reason: str, fault: Fault | None) -> None:
        """End the link, on purpose or for a fault: lose its transfers, fence its endpoint, say it
        to the peer. Idempotent.
        """
        if self._end is not None:
            return
        self._end = LinkEnd(reason, fault)
        logger.info("link with %s ended: %s", self.peer, reason)
        self._apply(self._side.on_link_end(reason))
        self.ended.set()
        if self._fabric_link is None:
            self._connection.hang_up()
            self._finish()
        else:
            self._end.tell(self._connection, no_data_path=self.lacks_data_path)
            self._fabric_link.fabric.fence(self._fabric_link.link)

    def give_up(self, reason: str, *, for_good: bool) -> None:
        """End a link over which no write has gone; the prefiller hears why."""
        if self._end is None:
            self.lacks_data_path = for_good
            self.end(reason, Fault.NO_DATA_PATH)

    def on_event(self, event: FabricEvent) -> None:
        """An event of our fabric link."""
        match event:
            case LinkUp():
                self.up.set()
            case LinkDown(reason=reason, code=code):
                fault = fault_of_link_down(event, was_up=self.up.is_set())
                if self._end is not None:
                    self._end.on_link_down(fault)
                elif self.up.is_set():
                    self.end(f"data path lost: {reason}", fault)
                else:
                    self.give_up(reason, for_good=not may_heal(code))
            case Arrived(slot=slot, generation=generation):
                self._arrival = Arrival(ns=event.arrival_ns, atoms=event.arrival_atoms)
                self._apply(self._side.on_arrived(slot, generation))
            case Surplus(slot=slot, generation=generation):
                self._apply(self._side.on_surplus(slot, generation))
            case Fenced():
                self._finish()
            case _:
                self.end(f"an event that a decoder cannot have: {event}", Fault.PROTOCOL)

    def _finish(self) -> None:
        if self._fabric_link is not None:
            self._hub.forget(self._fabric_link)
        self._apply(self._side.on_fenced())
        self.over.set()

    async def _tick(self) -> None:
        while True:
            if self._side.is_idle:
                self._started.clear()
                await self._started.wait()
            await asyncio.sleep(_TICK_S)
            if self._fabric_link is None or self._end is not None:
                continue
            fabric = self._fabric_link.fabric
            counts = {pair: fabric.count(*pair) for pair in self._side.watched()}
            self._apply(self._side.on_tick(now_s(), counts))

    def _apply(self, actions: list[DecodeAction]) -> None:
        for action in actions:
            match action:
                case Send(message=message):
                    self._send(message)
                case EndLink(reason=reason, fault=fault):
                    self.end(reason, fault)
                case Settled(transfer_id=transfer_id, proof=proof):
                    self._owner.transfer_settled(self, transfer_id, proof)
                case Scores(transfer_id=transfer_id, tokens=tokens):
                    self._owner.prompt_scored(self, transfer_id, tokens)
                case Cached(transfer_id=transfer_id, num_tokens=num_tokens):
                    self._owner.prefix_found(self, transfer_id, num_tokens)
                case Counted(transfer_id=transfer_id):
                    assert self._arrival is not None
                    self._owner.transfer_counted(self, transfer_id, self._arrival)
                case Ready(transfer_id=transfer_id):
                    self._owner.transfer_ready(self, transfer_id)
                case Lost(transfer_id=transfer_id, error=error, fault=fault):
                    self._owner.transfer_lost(self, transfer_id, error, fault)
                case PrefillTimes():
                    self._owner.prefill_times(self, action)
                case _:
                    self._apply_fabric(action)
        self._leave_if_drained()

    def _apply_fabric(self, action: Expect | Retarget | Release) -> None:
        assert self._fabric_link is not None
        fabric = self._fabric_link.fabric
        match action:
            case Expect(slot=slot, generation=generation, atoms=atoms):
                fabric.expect(self._fabric_link.link, slot, generation, atoms)
            case Retarget(slot=slot, generation=generation, atoms=atoms):
                fabric.retarget(slot, generation, atoms)
            case Release(slot=slot, generation=generation):
                fabric.release(slot, generation)

    def _send(self, message: ControlMessage) -> None:
        if self._end is not None:
            return
        try:
            self._connection.send(message)
        except PeerLost as error:
            self.end(error.message, Fault.CONTROL_UNREAD)
