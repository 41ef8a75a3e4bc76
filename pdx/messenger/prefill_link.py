"""A prefiller's side of one link: the driver that connects its state machine to socket, fabric and
engine.

Runs on the primary's event loop. A link ends once, for whatever reason comes first: the control
connection's end, a broken protocol, the data path, or this node. Ending it fences the fabric link;
the link is over when that is done.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from pdx.errors import FabricError, PeerLost, ProtocolError, RequestError
from pdx.fabric import (
    Fabric,
    FabricEvent,
    Fenced,
    LinkDown,
    LinkUp,
    Provider,
    TransferDone,
)
from pdx.fabric.descriptor import hosts
from pdx.kv.layout import NodeLayout
from pdx.kv.progress import layer_value
from pdx.messenger.actions import (
    Accept,
    Arm,
    CancelSend,
    Dropped,
    Faulted,
    HoldSource,
    OpenSend,
    PrefillAction,
    ReleaseSource,
    Seal,
    Send,
)
from pdx.messenger.control import ControlConnection
from pdx.messenger.data_path import DataPath, may_heal
from pdx.messenger.fabric_hub import FabricHub, FabricLink
from pdx.messenger.link_end import LinkEnd, fault_of_error, fault_of_link_down
from pdx.messenger.messages import Draining, Goodbye, Hello, Prefill
from pdx.messenger.prefill_side import PrefillSide
from pdx.metrics.clock import now_ns
from pdx.metrics.faults import Fault
from pdx.metrics.transfers import SendView
from pdx.request.batch import PromptScores
from pdx.request.chunk import PrefillChunk

__all__ = ["PrefillLink", "PrefillLinkOwner"]

logger = logging.getLogger(__name__)


class PrefillLinkOwner(Protocol):
    """What a link asks of the engine."""

    def accept(self, link: PrefillLink, prefill: Prefill) -> None:
        """Queue a prompt; raises RequestError if that is impossible."""

    def drop(self, link: PrefillLink, transfer_id: int) -> None:
        """Nobody wants the prompt any more."""

    def hold_source(self, link: PrefillLink, transfer_id: int) -> None:
        """Writes that read the request's pages begin."""

    def release_source(self, link: PrefillLink, transfer_id: int, *, unproved: bool) -> None:
        """They are over; ``unproved``: failed ones may read the pages until the link is over."""

    def on_fault(self, link: PrefillLink, fault: Fault) -> None:
        """Something failed, which is to be counted: a transfer, or once the link."""

    def link_over(self, link: PrefillLink) -> None:
        """The link has ended and is fenced: no write of it reads our pages any more."""


class PrefillLink:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        connection: ControlConnection,
        hello: Hello,
        hub: FabricHub,
        layout: NodeLayout,
        owner: PrefillLinkOwner,
    ) -> None:
        self.peer = connection.peer
        self.node = hello.node
        self.over = asyncio.Event()
        self._connection = connection
        self._hello = hello
        self._hub = hub
        self._layout = layout
        self._owner = owner
        self._side = PrefillSide(src=layout, dst=hello.manifest.layout())
        self._sends: dict[int, int] = {}
        self._transfer_of: dict[int, int] = {}
        self._is_up = False
        self._end: LinkEnd | None = None
        #: Why no write got through, where none did.
        self.lacks_data_path: str | None = None
        self._fabric_link: FabricLink | None = None
        self._data_path: DataPath | None = None

    @property
    def provider(self) -> str:
        return "" if self._fabric_link is None else self._fabric_link.provider

    @property
    def num_open(self) -> int:
        """Transfers that are not done."""
        return self._side.num_open

    @property
    def addresses(self) -> str:
        """Which side bound which data address, for people; empty where there is none."""
        return "" if self._data_path is None else self._data_path.whose

    def views(self) -> list[SendView]:
        """Its transfers that are not done, for people who look."""
        return self._side.views(self.peer, self.provider)

    def open_data_path(self, provider: Provider, peer_descriptor: bytes) -> bytes:
        """Open our endpoint, point it at the peer's, and return our descriptor.

        Raises:
            FabricError: the provider does not work here, or the descriptor is not one.
        """
        link = self._hub.open_link(provider, self._connection.local_host, self._on_event)
        descriptor = link.fabric.descriptor(link.link)
        try:
            self._data_path = DataPath(
                own_role="prefiller",
                peer_role="decoder",
                own_hosts=hosts(descriptor),
                peer_hosts=hosts(peer_descriptor),
                own_control_host=self._connection.local_host,
                peer_control_host=self._connection.peer_host,
            )
            link.fabric.connect(link.link, peer_descriptor)
        except FabricError:
            self._hub.discard(link)
            raise
        self._fabric_link = link
        return descriptor

    def do_without(self, provider: Provider, error: FabricError) -> None:
        """A data path that the decoder offers does not work on this node, another may."""
        self._hub.do_without(provider, error)

    async def run(self) -> None:
        """Serve the link until it ends; returns once it is fenced."""
        try:
            while self._end is None:
                message = await self._connection.receive()
                if isinstance(message, Goodbye):
                    if message.no_data_path:
                        self.lacks_data_path = f"it says: {message.reason}"
                    self.end(f"the decoder said goodbye: {message.reason}", message.fault)
                elif self._end is None:
                    self._apply(self._side.on_message(message))
                if self._end is not None:
                    self._end.hear(message)
        except (PeerLost, ProtocolError) as error:
            self.end(error.message, fault_of_error(error))
        assert self._end is not None
        await self._end.await_last_word(self._connection)
        if self._end.fault is not None:
            self._owner.on_fault(self, self._end.fault)
        await self._connection.close()
        await self.over.wait()

    def send_draining(self) -> None:
        """Tell the peer that this node is about to end the link."""
        self._connection.send(Draining())

    def on_chunk(self, transfer_id: int, chunk: PrefillChunk) -> None:
        """The next pass computes a chunk of the transfer's prompt."""
        self._apply(self._side.on_chunk(transfer_id, chunk, now_ns()))

    def on_chunk_done(self, transfer_id: int) -> None:
        """The pass with the transfer's latest chunk has been taken in."""
        self._apply(self._side.on_chunk_done(transfer_id, now_ns()))

    def on_scores(self, transfer_id: int, scores: PromptScores, *, last: bool) -> None:
        """A pass has scored some of the prompt's tokens."""
        actions = self._side.on_scores(transfer_id, scores.first_position, scores.tokens, last=last)
        self._apply(actions)

    def end(self, reason: str, fault: Fault | None, *, no_data_path: bool = False) -> None:
        """End the link, on purpose or for a fault: drop its work, fence its endpoint, say it to
        the peer. Idempotent.
        """
        if self._end is not None:
            return
        self._end = LinkEnd(reason, fault)
        logger.info("link with %s ended: %s", self.peer, reason)
        self._apply(self._side.on_link_end())
        if self._fabric_link is None:
            self._connection.hang_up()
            self._finish()
        else:
            self._end.tell(self._connection, no_data_path=no_data_path)
            self._fabric_link.fabric.fence(self._fabric_link.link)

    # ---- fabric events --------------------------------------------------------------------

    def _on_event(self, event: FabricEvent) -> None:
        match event:
            case LinkUp():
                self._is_up = True
                logger.info("data path with %s is up (%s)", self.peer, self.provider)
            case LinkDown(reason=reason, code=code):
                fault = fault_of_link_down(event, was_up=self._is_up)
                if self._end is not None:
                    self._end.on_link_down(fault)
                if not self._is_up and self._end is None:
                    self.lacks_data_path = reason
                self.end(
                    f"data path lost: {reason}",
                    fault,
                    no_data_path=not self._is_up and not may_heal(code),
                )
            case TransferDone():
                self._on_transfer_done(event)
            case Fenced():
                self._finish()
            case _:
                self.end(f"a decoder wrote to a prefiller: {event}", Fault.PROTOCOL)

    def _on_transfer_done(self, event: TransferDone) -> None:
        transfer_id = self._transfer_of.pop(event.transfer)
        del self._sends[transfer_id]
        actions = self._side.on_send_done(
            transfer_id,
            posted=event.posted_atoms,
            failed=event.failed_atoms,
            last_progress_ns=event.last_progress_ns or 0,
            now_ns=now_ns(),
        )
        self._apply(actions)

    def _finish(self) -> None:
        if self._fabric_link is not None:
            self._hub.forget(self._fabric_link)
        self.over.set()
        self._owner.link_over(self)

    # ---- actions --------------------------------------------------------------------------

    def _apply(self, actions: list[PrefillAction]) -> None:
        for action in actions:
            self._apply_one(action)

    def _apply_one(self, action: PrefillAction) -> None:
        match action:
            case Send(message=message):
                if self._end is None:
                    try:
                        self._connection.send(message)
                    except PeerLost as error:
                        self.end(error.message, Fault.CONTROL_UNREAD)
            case Accept(prefill=prefill):
                try:
                    self._owner.accept(self, prefill)
                except RequestError as error:
                    logger.info("%s: rejected: %s", prefill.names.cleaned(), error.message)
                    self._apply(self._side.refuse(prefill.transfer_id, error))
            case Dropped(transfer_id=transfer_id):
                self._owner.drop(self, transfer_id)
            case Faulted(fault=fault):
                self._owner.on_fault(self, fault)
            case HoldSource(transfer_id=transfer_id):
                self._owner.hold_source(self, transfer_id)
            case ReleaseSource(transfer_id=transfer_id, unproved=unproved):
                self._owner.release_source(self, transfer_id, unproved=unproved)
            case OpenSend():
                self._open_send(action)
            case _:
                self._apply_fabric(action)

    def _open_send(self, action: OpenSend) -> None:
        assert self._fabric_link is not None
        fabric, link = self._fabric_link.fabric, self._fabric_link.link
        try:
            send = fabric.open_transfer(link, action.slot, action.generation)
        except FabricError as error:  # the link is down; its event, which says why, is on the way
            self.end(error.message, Fault.DATA_PATH)
            self._owner.drop(self, action.transfer_id)  # its last chunk need not run either
            done = self._side.on_send_done(
                action.transfer_id, posted=0, failed=0, last_progress_ns=0
            )
            self._apply(done)
            return
        self._sends[action.transfer_id] = send
        self._transfer_of[send] = action.transfer_id

    def _apply_fabric(self, action: Arm | Seal | CancelSend) -> None:
        assert self._fabric_link is not None
        fabric = self._fabric_link.fabric
        send = self._sends.get(action.transfer_id)
        if send is None:
            return
        try:
            self._apply_to_send(fabric, send, action)
        except FabricError as error:
            # It failed on the worker while this was on its way; TransferDone says so.
            logger.debug("transfer %d takes nothing more: %s", action.transfer_id, error)
            fabric.cancel(send)

    def _apply_to_send(self, fabric: Fabric, send: int, action: Arm | Seal | CancelSend) -> None:
        match action:
            case Arm(batches=batches, pass_idx=pass_idx):
                num_layers = self._layout.rank.num_layers
                words = self._hub.memory.progress_addresses
                for each in batches:
                    word = words[each.src_rank]
                    first_value = layer_value(pass_idx, each.first_layer, num_layers)
                    fabric.arm(send, each.batch, word_address=word, first_value=first_value)
            case Seal():
                fabric.seal(send)
            case CancelSend():
                fabric.cancel(send)
