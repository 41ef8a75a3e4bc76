"""A prefiller's transfers over one link, as a pure state machine: event in, actions out. No socket,
clock or thread.

Invariants, whatever order events come in:

1. Each accepted transfer ends with exactly one of Posted, Failed, Drained, or the link's end.
Cancel always gets its
   Drained: totals are kept until the slot is used again.
2. Nothing is armed for a transfer after it was cancelled, failed or lost.
3. Source pages are held from the first armed chunk until the fabric says that the transfer is done.

    Prefill -> QUEUED --first chunk--> OPEN --last chunk--> SEALED --done--> (Posted) DONE
                 |                       +------ Cancel ------+--> CANCELLED --done--> (Drained)
                 DONE +--Cancel--> (Drained 0) DONE
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from pdx.errors import InvalidRequest, ProtocolError, RequestError
from pdx.kv.layout import NodeLayout
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
from pdx.messenger.messages import (
    Cancel,
    ChunkTimes,
    ControlMessage,
    Drained,
    Failed,
    Posted,
    Prefill,
    PrefixFound,
    PromptLogprobs,
    Reject,
    Sealed,
)
from pdx.messenger.plan import SendCursor, TransferPlan
from pdx.metrics.faults import Fault
from pdx.metrics.transfers import SendView
from pdx.request.batch import ScoredToken
from pdx.request.chunk import PrefillChunk

__all__ = [
    "PrefillSide",
]


class _State(enum.Enum):
    QUEUED = enum.auto()
    OPEN = enum.auto()
    SEALED = enum.auto()
    CANCELLED = enum.auto()


_SHOWN: dict[_State, Literal["queued", "open", "sealed", "cancelled"]] = {
    _State.QUEUED: "queued",
    _State.OPEN: "open",
    _State.SEALED: "sealed",
    _State.CANCELLED: "cancelled",
}


@dataclass(slots=True)
class _Transfer:
    prefill: Prefill
    plan: TransferPlan
    cursor: SendCursor
    state: _State = _State.QUEUED
    prefill_start_ns: int = 0
    chunks: list[ChunkTimes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Totals:
    """What is left of a transfer that is done: thousands are kept, and prompts are long."""

    posted: int
    failed: int


class PrefillSide:
    """See the module's docstring.

    Args:
        src, dst: this node's KV memory and the decoder's (the handshake found that they fit).
    """

    def __init__(self, *, src: NodeLayout, dst: NodeLayout) -> None:
        self._src, self._dst = src, dst
        #: Those that are not done yet.
        self._transfers: dict[int, _Transfer] = {}
        #: Totals of those that are done, until their slot is used again: a late Cancel gets them.
        self._totals: dict[int, _Totals] = {}
        #: The last transfer of each slot.
        self._by_slot: dict[int, int] = {}
        self._ended = False

    @property
    def num_open(self) -> int:
        """Transfers that are queued or not yet done."""
        return len(self._transfers)

    def views(self, decoder: str, provider: str) -> list[SendView]:
        """Those that are not done, for people who look."""
        return [
            SendView(
                transfer_id=transfer_id,
                state=_SHOWN[transfer.state],
                decoder=decoder,
                provider=provider,
                num_tokens=len(transfer.prefill.token_ids),
                num_armed=transfer.chunks[-1].end_position if transfer.chunks else 0,
                atoms=transfer.prefill.atoms,
            )
            for transfer_id, transfer in self._transfers.items()
        ]

    def on_message(self, message: ControlMessage) -> list[PrefillAction]:
        """A message of the decoder.

        Raises:
            ProtocolError: it may not send this.
        """
        match message:
            case Prefill():
                return self._on_prefill(message)
            case Cancel(transfer_id=transfer_id):
                return self._on_cancel(transfer_id)
            case _:
                raise ProtocolError(f"a decoder may not send {type(message).__name__}")

    def refuse(self, transfer_id: int, error: RequestError) -> list[PrefillAction]:
        """The engine cannot take what was accepted; nothing has been posted."""
        del self._transfers[transfer_id]
        is_ours = error.http_status >= 500
        faulted = [Faulted(Fault.PROMPT_REJECTED)] if is_ours else []
        return [*faulted, _reject(transfer_id, error)]

    def on_chunk(self, transfer_id: int, chunk: PrefillChunk, now_ns: int) -> list[PrefillAction]:
        """The next pass computes a chunk of the prompt; called before the pass is sent."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return []
        actions: list[PrefillAction] = []
        if transfer.state is _State.QUEUED:
            transfer.state = _State.OPEN
            transfer.prefill_start_ns = now_ns
            prefill = transfer.prefill
            actions += [
                HoldSource(transfer_id),
                OpenSend(transfer_id, prefill.slot, prefill.generation),
            ]
            if chunk.start:
                actions.append(Send(PrefixFound(transfer_id=transfer_id, num_tokens=chunk.start)))
        if transfer.state is not _State.OPEN:
            return []
        transfer.chunks.append(ChunkTimes(end_position=chunk.end, start_ns=now_ns))
        # What lies before the chunk came from the prefix cache: passes before this one fill it.
        for stop, last, filled_by in (
            (chunk.start, False, chunk.pass_idx - 1),
            (chunk.end, chunk.last, chunk.pass_idx),
        ):
            batches = transfer.cursor.advance(chunk.page_indices, stop, last=last)
            if batches:
                actions.append(Arm(transfer_id, batches, filled_by))
        if chunk.last:
            transfer.state = _State.SEALED
            actions.append(Seal(transfer_id))
        return actions

    def on_chunk_done(self, transfer_id: int, now_ns: int) -> list[PrefillAction]:
        """The pass with the transfer's latest chunk has been taken in. Posted tells of that, where
        it does not come first; where it was the last chunk, the peer may expect its atoms.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None or not transfer.chunks:
            return []
        transfer.chunks[-1] = msgspec.structs.replace(transfer.chunks[-1], end_ns=now_ns)
        is_sealed = transfer.state is _State.SEALED
        return [Send(Sealed(transfer_id=transfer_id))] if is_sealed else []

    def on_scores(
        self, transfer_id: int, first_position: int, tokens: list[ScoredToken], *, last: bool
    ) -> list[PrefillAction]:
        """A pass has scored some of the prompt's tokens."""
        transfer = self._transfers.get(transfer_id)
        cancelled = transfer is not None and transfer.state is _State.CANCELLED
        known = transfer is not None or transfer_id in self._totals
        if self._ended or cancelled or not known:
            return []
        message = PromptLogprobs(
            transfer_id=transfer_id, first_position=first_position, tokens=tokens, last=last
        )
        return [Send(message)]

    def on_send_done(
        self, transfer_id: int, *, posted: int, failed: int, last_progress_ns: int, now_ns: int = 0
    ) -> list[PrefillAction]:
        """The fabric is done with a transfer: sealed and complete, cancelled and drained, failed,
        or fenced.
        """
        transfer = self._transfers.pop(transfer_id)
        totals = self._keep_totals(transfer_id, transfer, posted, failed)
        released = ReleaseSource(transfer_id, unproved=failed > 0)
        if self._ended:
            return [released]
        if transfer.state is _State.CANCELLED:
            return [released, _drained(transfer_id, totals)]
        if transfer.state is _State.SEALED and not failed and posted == transfer.prefill.atoms:
            return [released, _posted(transfer_id, transfer, posted, last_progress_ns, now_ns)]
        reason = f"{failed} writes failed, {posted} of {transfer.prefill.atoms} posted"
        message = Failed(transfer_id=transfer_id, atoms=posted, failed=failed, reason=reason)
        # A failed write takes the link down, which is counted then.
        faulted = [] if failed else [Faulted(Fault.POST_FAILED)]
        return [Dropped(transfer_id), released, *faulted, Send(message)]

    def on_link_end(self) -> list[PrefillAction]:
        """The link is over; its fence makes the fabric finish every open transfer."""
        self._ended = True
        actions: list[PrefillAction] = []
        for transfer_id, transfer in list(self._transfers.items()):
            if transfer.state in (_State.QUEUED, _State.OPEN):
                actions.append(Dropped(transfer_id))
            if transfer.state is _State.QUEUED:
                del self._transfers[transfer_id]
            else:
                transfer.state = _State.CANCELLED
        return actions

    def _on_prefill(self, message: Prefill) -> list[PrefillAction]:
        if message.transfer_id in self._transfers or message.transfer_id in self._totals:
            raise ProtocolError(f"transfer {message.transfer_id} is asked for twice")
        # The decoder may have counted everything before we learn that our last write is complete.
        if (before := self._by_slot.get(message.slot)) is not None:
            self._totals.pop(before, None)
        plan = TransferPlan(
            self._src,
            self._dst,
            transfer_id=message.transfer_id,
            num_tokens=len(message.token_ids),
            first_position=message.first_position,
            dst_page_indices=message.page_indices,
        )
        try:
            plan.check_atoms(message.atoms_by_rank)
        except InvalidRequest as error:
            return [_reject(message.transfer_id, error)]
        self._transfers[message.transfer_id] = _Transfer(message, plan, SendCursor(plan))
        self._by_slot[message.slot] = message.transfer_id
        return [Accept(message)]

    def _on_cancel(self, transfer_id: int) -> list[PrefillAction]:
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            # Without totals it was rejected: nothing was ever posted.
            return [_drained(transfer_id, self._totals.get(transfer_id))]
        match transfer.state:
            case _State.QUEUED:
                del self._transfers[transfer_id]
                totals = self._keep_totals(transfer_id, transfer, posted=0, failed=0)
                return [Dropped(transfer_id), _drained(transfer_id, totals)]
            case _State.OPEN:
                transfer.state = _State.CANCELLED
                return [Dropped(transfer_id), CancelSend(transfer_id)]
            case _State.SEALED:
                transfer.state = _State.CANCELLED
                return [CancelSend(transfer_id)]
            case _State.CANCELLED:
                return []

    def _keep_totals(
        self, transfer_id: int, transfer: _Transfer, posted: int, failed: int
    ) -> _Totals:
        """A done transfer's totals; kept only where its slot was not used again meanwhile."""
        totals = _Totals(posted, failed)
        if self._by_slot[transfer.prefill.slot] == transfer_id:
            self._totals[transfer_id] = totals
        return totals


def _drained(transfer_id: int, totals: _Totals | None) -> Send:
    posted, failed = (0, 0) if totals is None else (totals.posted, totals.failed)
    return Send(Drained(transfer_id=transfer_id, atoms=posted, failed=failed))


def _posted(
    transfer_id: int, transfer: _Transfer, posted: int, last_progress_ns: int, now_ns: int
) -> Send:
    return Send(
        Posted(
            transfer_id=transfer_id,
            atoms=posted,
            prefill_start_ns=transfer.prefill_start_ns,
            last_layer_ns=last_progress_ns,
            posted_ns=now_ns,
            chunks=transfer.chunks,
        )
    )


def _reject(transfer_id: int, error: RequestError) -> Send:
    return Send(
        Reject(
            transfer_id=transfer_id,
            http_status=error.http_status,
            kind=error.kind,
            message=error.message,
        )
    )
