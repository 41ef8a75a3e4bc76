"""A prefiller's side of one link: the driver that connects its state machine to socket, fabric and engine.

Runs on the primary's event loop. A link ends once, for whatever reason comes first: the control connection's end, a
broken protocol, the data path, or this node. Ending it fences the fabric link; the link is over when that is done.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Protocol

import numpy as np

from pdx.errors import PeerLost, ProtocolError, RequestError
from pdx.fabric import Fenced, FabricEvent, LinkDown, LinkUp, PageBatch, TransferDone
from pdx.kv.layout import KvLayout
from pdx.kv.progress import layer_value
from pdx.messenger.control import ControlConnection
from pdx.messenger.decode_side import EndLink, Send
from pdx.messenger.fabric_hub import FabricHub, FabricLink, Provider
from pdx.messenger.messages import Goodbye, Hello
from pdx.messenger.prefill_side import (
    Accept,
    Arm,
    CancelSend,
    Dropped,
    HoldSource,
    OpenSend,
    PrefillAction,
    PrefillSide,
    ReleaseSource,
    Seal,
)

__all__ = ["PrefillLink", "PrefillLinkOwner"]

logger = logging.getLogger(__name__)


class PrefillLinkOwner(Protocol):
    """What a link asks of the engine."""

    def accept(self, link: PrefillLink, transfer_id: int, token_ids: list[int]) -> None:
        """Queue a prompt; raises RequestError if that is impossible."""

    def drop(self, link: PrefillLink, transfer_id: int) -> None:
        """Nobody wants the prompt any more."""

    def hold_source(self, link: PrefillLink, transfer_id: int) -> None:
        """Writes that read the request's pages begin."""

    def release_source(self, link: PrefillLink, transfer_id: int, *, lost_reader: bool) -> None:
        """They are over; ``lost_reader``: the peer may still pull from the pages until it is gone."""

    def reader_gone(self, link: PrefillLink) -> None:
        """The process of a lost peer has ended."""

    def link_over(self, link: PrefillLink) -> None:
        """The link has ended and is fenced."""


class PrefillLink:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        connection: ControlConnection,
        hello: Hello,
        hub: FabricHub,
        layout: KvLayout,
        owner: PrefillLinkOwner,
    ) -> None:
        self.peer = connection.peer
        self.node = hello.node
        self.over = asyncio.Event()
        self._connection = connection
        self._hello = hello
        self._hub = hub
        self._layout = layout
        self._num_dst_pages = hello.manifest.num_pages
        self._owner = owner
        self._side = PrefillSide(
            page_size=layout.page_size,
            num_layers=layout.num_layers,
            num_dst_pages=self._num_dst_pages,
        )
        self._sends: dict[int, int] = {}
        self._transfer_of: dict[int, int] = {}
        self._ended = False
        self._num_lost_readers = 0
        self._fabric_link: FabricLink | None = None
        #: Of the decoder's process, where it can pull from our memory (shm). Opened early: pids are reused.
        self._pidfd: int | None = None

    @property
    def provider(self) -> str:
        return "" if self._fabric_link is None else self._fabric_link.provider

    @property
    def num_open(self) -> int:
        """Transfers that are not done."""
        return self._side.num_open

    def open_data_path(self, provider: Provider, peer_descriptor: bytes) -> bytes:
        """Open our endpoint, point it at the peer's, and return our descriptor.

        Raises:
            FabricError: the provider does not work here, or the descriptor is not one.
            PeerLost: the peer's process is gone.
        """
        if provider == "shm":
            try:
                self._pidfd = os.pidfd_open(self._hello.pid)
            except OSError as error:
                raise PeerLost(f"process {self._hello.pid} of {self.peer}: {error}") from error
        link = self._hub.open_link(provider, self._connection.local_host, self._on_event)
        self._fabric_link = link
        link.fabric.connect(link.link, peer_descriptor)
        return link.fabric.descriptor(link.link)

    async def run(self) -> None:
        """Serve the link until it ends; returns once it is fenced."""
        try:
            while not self._ended:
                message = await self._connection.receive()
                if self._ended:
                    break
                if isinstance(message, Goodbye):
                    self.end(f"the decoder said goodbye: {message.reason}")
                else:
                    self._apply(self._side.on_message(message))
        except (PeerLost, ProtocolError) as error:
            self.end(error.message)
        await self.over.wait()
        await self._connection.close()

    def send(self, message: Goodbye) -> None:
        """Tell the peer that this node ends the link."""
        self._connection.send(message)

    def on_chunk(
        self,
        transfer_id: int,
        *,
        pass_idx: int,
        end: int,
        last: bool,
        src_page_indices: tuple[int, ...],
    ) -> None:
        """The next pass computes the request's positions below ``end``."""
        actions = self._side.on_chunk(
            transfer_id,
            pass_idx=pass_idx,
            end=end,
            last=last,
            src_page_indices=src_page_indices,
            now_ns=time.monotonic_ns(),
        )
        self._apply(actions)

    def end(self, reason: str) -> None:
        """End the link: drop its work, fence its endpoint. Idempotent."""
        if self._ended:
            return
        self._ended = True
        logger.info("link with %s ended: %s", self.peer, reason)
        self._apply(self._side.on_link_end())
        if self._fabric_link is None:
            self._finish()
        else:
            self._fabric_link.fabric.fence(self._fabric_link.link)

    # ---- fabric events --------------------------------------------------------------------

    def _on_event(self, event: FabricEvent) -> None:
        match event:
            case LinkUp():
                logger.info("data path with %s is up (%s)", self.peer, self.provider)
            case LinkDown(reason=reason):
                self.end(f"data path lost: {reason}")
            case TransferDone():
                self._on_transfer_done(event)
            case Fenced():
                self._finish()
            case _:
                self.end(f"a decoder wrote to a prefiller: {event}")

    def _on_transfer_done(self, event: TransferDone) -> None:
        transfer_id = self._transfer_of.pop(event.transfer)
        del self._sends[transfer_id]
        actions = self._side.on_send_done(
            transfer_id,
            posted=event.posted_atoms,
            failed=event.failed_atoms,
            last_progress_ns=event.last_progress_ns,
        )
        self._apply(actions)

    def _finish(self) -> None:
        if self._fabric_link is not None:
            self._hub.forget(self._fabric_link)
        self.over.set()
        self._watch_peer_process()
        self._owner.link_over(self)

    def _watch_peer_process(self) -> None:
        """Lost readers are gone when their process is: a stopped one still pulls when it wakes."""
        if self._pidfd is None:
            return
        if not self._num_lost_readers:
            os.close(self._pidfd)
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_peer_gone, self._pidfd)

    def _on_peer_gone(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self._owner.reader_gone(self)

    # ---- actions --------------------------------------------------------------------------

    def _apply(self, actions: list[PrefillAction]) -> None:
        for action in actions:
            self._apply_one(action)

    def _apply_one(self, action: PrefillAction) -> None:
        match action:
            case Send(message=message):
                if not self._ended:
                    try:
                        self._connection.send(message)
                    except PeerLost as error:
                        self.end(error.message)
            case EndLink(reason=reason):
                self.end(reason)
            case Accept(transfer_id=transfer_id, token_ids=token_ids):
                try:
                    self._owner.accept(self, transfer_id, token_ids)
                except RequestError as error:
                    self._apply(self._side.refuse(transfer_id, error))
            case Dropped(transfer_id=transfer_id):
                self._owner.drop(self, transfer_id)
            case HoldSource(transfer_id=transfer_id):
                self._owner.hold_source(self, transfer_id)
            case ReleaseSource(transfer_id=transfer_id, unproved=unproved):
                lost_reader = unproved and self.provider == "shm"
                self._num_lost_readers += lost_reader
                self._owner.release_source(self, transfer_id, lost_reader=lost_reader)
            case _:
                self._apply_fabric(action)

    def _apply_fabric(self, action: OpenSend | Arm | Seal | CancelSend) -> None:
        assert self._fabric_link is not None
        fabric = self._fabric_link.fabric
        match action:
            case OpenSend(transfer_id=transfer_id, slot=slot, generation=generation):
                send = fabric.open_transfer(self._fabric_link.link, slot, generation)
                self._sends[transfer_id] = send
                self._transfer_of[send] = transfer_id
            case Arm(transfer_id=transfer_id, pass_idx=pass_idx):
                fabric.arm(
                    self._sends[transfer_id],
                    self._page_batch(action),
                    word_address=self._hub.memory.progress_address,
                    first_value=layer_value(pass_idx, 0, self._layout.num_layers),
                )
            case Seal(transfer_id=transfer_id):
                fabric.seal(self._sends[transfer_id])
            case CancelSend(transfer_id=transfer_id):
                fabric.cancel(self._sends[transfer_id])

    def _page_batch(self, action: Arm) -> PageBatch:
        page_bytes = self._layout.page_bytes
        return PageBatch(
            src_pages=np.array([pair.src_page_idx for pair in action.pairs], np.uint32),
            dst_pages=np.array([pair.dst_page_idx for pair in action.pairs], np.uint32),
            page_bytes=page_bytes,
            num_layers=self._layout.num_layers,
            src_layer_stride=self._layout.layer_stride_bytes,
            dst_layer_stride=self._num_dst_pages * page_bytes,
        )
