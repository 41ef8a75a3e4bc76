"""A decoder's transfers over one link, as a pure state machine: event in, actions out. No socket,
clock or thread.

Invariants, whatever order events come in:

1. A transfer is Settled exactly once, and only by the count, by the peer's drained total that the
   count equals, by a fence, or because the peer never started. Until then its pages and its slot
   stay taken. A clock may end the link (which fences it); it never settles anything.
2. A transfer gets Ready or Lost at most once, never both, and never after the engine cancelled it.
3. Ready comes only from a complete count while the link was alive, and after the prompt's scores
   where they were asked for.

    start -> COUNTING --count complete--> (Settled, Counted, Ready) READY --Posted--> gone
                |  |   (with scores of the prompt to come: (Settled) SCORING --last scores--> READY)
                |  |--Reject-----------> (Settled, Lost)  gone
                |  |--Failed-----------> (Lost) -> DRAINING --count = total--> (Settled) gone
                |  +--cancel-----------> CANCELLED --Drained--> DRAINING
                |                            +--count complete--> (Settled) READY
                +--link ends-----------> (Lost) ABANDONED --fenced--> (Settled) gone
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pdx.errors import ProtocolError, RequestError, TransferFailed
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
from pdx.messenger.messages import (
    Cancel,
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
from pdx.messenger.slots import SlotTable
from pdx.metrics.faults import Fault

__all__ = [
    "DecodeSide",
    "TransferTimeouts",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTimeouts:
    """Seconds. These clocks only ever end a link."""

    #: Without a new imm after the peer said how much it posted: more than one write may take.
    lost_writes_s: float = 2.5
    #: Without a new imm after the peer has computed the prompt. Imms of transfers that were asked
    #: for before that count, for either clock: their writes may be in the way of its own.
    stalled_writes_s: float = 10.0
    #: Between Cancel and Drained.
    drain_s: float = 10.0
    #: Without a score of the prompt after its KV cache is here. The last chunk's scores follow its
    #: KV cache as soon as the output head has run over it, which takes a CPU seconds.
    scores_s: float = 60.0
    #: Between the complete count and the peer's last word. It waits for completions of writes that
    #: have landed: when they are lost, its pages are pinned until the link ends.
    finish_s: float = 10.0


class _State(enum.Enum):
    COUNTING = enum.auto()
    CANCELLED = enum.auto()
    DRAINING = enum.auto()
    SCORING = enum.auto()
    READY = enum.auto()
    ABANDONED = enum.auto()


_TOTAL_IS_NEWS_NO_MORE = (_State.SCORING, _State.READY, _State.DRAINING)


@dataclass(slots=True)
class _Transfer:
    transfer_id: int
    slot: int
    generation: int
    atoms: int
    #: Its place in the order in which transfers were asked for.
    place: int
    state: _State = _State.COUNTING
    #: When to give up on the link; None: no clock runs.
    deadline: float | None = None
    #: Seconds without a new imm, where the clock is for those; None: it is for something else.
    patience_s: float | None = None
    #: Transfers before this place may be in the way of its writes.
    behind: int = 0
    awaits_scores: bool = False
    posted: bool = False
    #: Count at the last tick that was told of it.
    ticked: int = 0

    @property
    def pair(self) -> tuple[int, int]:
        return self.slot, self.generation


class DecodeSide:
    """See the module's docstring. ``slots`` is the node's table, shared by its links."""

    def __init__(self, slots: SlotTable, timeouts: TransferTimeouts) -> None:
        self._slots = slots
        self._timeouts = timeouts
        self._transfers: dict[int, _Transfer] = {}
        self._by_slot: dict[tuple[int, int], _Transfer] = {}
        self._ended = False
        self._num_started = 0
        #: Places of transfers that came, whole or in part, since the last tick.
        self._came: set[int] = set()

    @property
    def num_open(self) -> int:
        """Transfers that are not settled yet."""
        return len(self._by_slot)

    @property
    def is_idle(self) -> bool:
        """No transfer is known, so that time does not matter."""
        return not self._transfers

    def start_transfer(self, prefill: Prefill) -> list[DecodeAction]:
        """Begin a transfer in the slot that the message names; the caller took it."""
        assert not self._ended and prefill.transfer_id not in self._transfers
        slot, generation = prefill.slot, prefill.generation
        transfer = _Transfer(
            prefill.transfer_id, slot, generation, prefill.atoms, self._num_started
        )
        self._num_started += 1
        transfer.awaits_scores = prefill.prompt_logprobs is not None
        self._transfers[prefill.transfer_id] = transfer
        self._by_slot[slot, generation] = transfer
        return [Expect(slot, generation, prefill.atoms), Send(prefill)]

    def cancel(self, transfer_id: int, now: float) -> list[DecodeAction]:
        """The engine does not want the result any more. Unknown and finished transfers are fine."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.state is _State.SCORING:
            self._await_last_word(transfer)  # its writes are counted: nothing is left to stop
        if transfer is None or transfer.state is not _State.COUNTING:
            return []
        transfer.state = _State.CANCELLED
        transfer.deadline, transfer.patience_s = now + self._timeouts.drain_s, None
        return [Send(Cancel(transfer_id=transfer_id))]

    def on_message(self, message: ControlMessage, now: float) -> list[DecodeAction]:
        """A message of the prefiller.

        Raises:
            ProtocolError: it may not send this.
        """
        match message:
            case Reject():
                return self._on_reject(message)
            case PrefixFound(transfer_id=transfer_id, num_tokens=num_tokens):
                known = transfer_id in self._transfers
                return [Cached(transfer_id, num_tokens)] if known else []
            case PromptLogprobs():
                return self._on_scores(message)
            case Sealed(transfer_id=transfer_id):
                return self._on_sealed(transfer_id, now)
            case Posted():
                return self._on_posted(message, now)
            case Failed():
                return self._on_failed(message, now)
            case Drained(transfer_id=transfer_id, atoms=atoms, failed=failed):
                return self._on_total(transfer_id, atoms, failed, now)
            case _:
                raise ProtocolError(f"a prefiller may not send {type(message).__name__}")

    def on_arrived(self, slot: int, generation: int) -> list[DecodeAction]:
        """The slot's count equals what it waits for."""
        transfer = self._by_slot.get((slot, generation))
        if transfer is None or self._ended:
            return []
        self._came.add(transfer.place)
        proof = Proof.DRAINED if transfer.state is _State.DRAINING else Proof.COUNTED
        actions = self._settle(transfer, proof)
        if transfer.state is _State.COUNTING:
            transfer.state = _State.SCORING
            transfer.deadline = transfer.patience_s = None
            counted = Counted(transfer.transfer_id)
            return [*actions, counted, *self._ready_if_scored(transfer)]
        if transfer.state is _State.DRAINING:
            del self._transfers[transfer.transfer_id]
        else:
            self._await_last_word(transfer)
        return actions

    def _await_last_word(self, transfer: _Transfer) -> None:
        """Nothing is wanted of a transfer any more, but the peer's word that it is done."""
        transfer.state = _State.READY
        transfer.deadline = transfer.patience_s = None
        if transfer.posted:
            del self._transfers[transfer.transfer_id]

    def _on_scores(self, message: PromptLogprobs) -> list[DecodeAction]:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None or not transfer.awaits_scores:
            return []
        transfer.awaits_scores = not message.last
        if transfer.state is _State.SCORING:
            transfer.deadline = None  # the next tick starts the clock again
        if transfer.state not in (_State.COUNTING, _State.SCORING):
            return []
        scores = Scores(message.transfer_id, message.tokens)
        ready = self._ready_if_scored(transfer) if transfer.state is _State.SCORING else []
        return [scores, *ready]

    def _ready_if_scored(self, transfer: _Transfer) -> list[DecodeAction]:
        if transfer.awaits_scores:
            return []
        self._await_last_word(transfer)
        return [Ready(transfer.transfer_id)]

    def on_surplus(self, slot: int, generation: int) -> list[DecodeAction]:
        """More atoms than expected came for a pair: somebody writes what nobody asked for."""
        reason = f"more writes than expected came for slot {slot}.{generation}"
        return [EndLink(reason, Fault.PROTOCOL)]

    def on_tick(self, now: float, counts: dict[tuple[int, int], int]) -> list[DecodeAction]:
        """Time has passed. ``counts`` are the atoms counted so far, by (slot, generation)."""
        for transfer in self._by_slot.values():
            count = counts.get(transfer.pair, 0)
            if count > transfer.ticked:
                self._came.add(transfer.place)
            transfer.ticked = count
        first_that_came = min(self._came, default=self._num_started)
        self._came.clear()
        for transfer in self._transfers.values():
            if transfer.patience_s is not None and first_that_came < transfer.behind:
                transfer.deadline = now + transfer.patience_s
            if transfer.deadline is None and transfer.state in (_State.SCORING, _State.READY):
                is_ready = transfer.state is _State.READY
                timeouts = self._timeouts
                transfer.deadline = now + (timeouts.finish_s if is_ready else timeouts.scores_s)
            if transfer.deadline is None or now < transfer.deadline:
                continue
            return [_overdue(transfer)]
        return []

    def watched(self) -> list[tuple[int, int]]:
        """Pairs whose counts :meth:`on_tick` needs: those with a clock running; where one awaits
        atoms, those of all, which may be in its way.
        """
        if any(transfer.patience_s is not None for transfer in self._by_slot.values()):
            return list(self._by_slot)
        return [pair for pair, t in self._by_slot.items() if t.deadline is not None]

    def pair_of(self, transfer_id: int) -> tuple[int, int] | None:
        """The slot and generation of a transfer that is not settled."""
        transfer = self._transfers.get(transfer_id)
        pair = None if transfer is None else (transfer.slot, transfer.generation)
        return pair if pair in self._by_slot else None

    def on_link_end(self, reason: str) -> list[DecodeAction]:
        """The link is over. Everything unfinished is lost, but stays taken until the fence."""
        self._ended = True
        actions: list[DecodeAction] = []
        for transfer in list(self._transfers.values()):
            if transfer.state in (_State.COUNTING, _State.SCORING):
                actions.append(Lost(transfer.transfer_id, _link_lost(reason)))
            if transfer.state in (_State.READY, _State.SCORING):
                del self._transfers[transfer.transfer_id]
            transfer.state = _State.ABANDONED
        return actions

    def on_fenced(self) -> list[DecodeAction]:
        """The endpoint is closed: no byte can land any more, and the fabric has disarmed the link's
        slots.
        """
        assert self._ended
        actions: list[DecodeAction] = []
        for transfer in list(self._by_slot.values()):
            self._forget_slot(transfer)
            actions.append(Settled(transfer.transfer_id, Proof.FENCED))
        self._transfers.clear()
        return actions

    def _on_reject(self, message: Reject) -> list[DecodeAction]:
        transfer = self._transfers.pop(message.transfer_id, None)
        if transfer is None:
            return []
        if transfer.state not in (_State.COUNTING, _State.CANCELLED):
            raise ProtocolError(f"transfer {message.transfer_id} was rejected after it had begun")
        actions = self._settle(transfer, Proof.NOT_STARTED)
        if transfer.state is _State.COUNTING:
            fault = Fault.PROMPT_REJECTED if message.http_status >= 500 else None
            actions.append(Lost(transfer.transfer_id, _rejection(message), fault))
        return actions

    def _on_sealed(self, transfer_id: int, now: float) -> list[DecodeAction]:
        """The prompt has been computed: its atoms are on their way, or lost with their completions,
        and then nobody else would ever hear of it.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.state is _State.COUNTING and not transfer.posted:
            self._await_atoms(transfer, now, self._timeouts.stalled_writes_s)
        return []

    def _on_posted(self, message: Posted, now: float) -> list[DecodeAction]:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None:
            return []
        if message.atoms != transfer.atoms:
            reason = f"the peer posted {message.atoms} atoms, not {transfer.atoms}"
            return [EndLink(reason, Fault.PROTOCOL)]
        transfer.posted = True
        if transfer.state is _State.READY:
            del self._transfers[message.transfer_id]
        elif transfer.state is _State.SCORING:
            pass  # everything is counted; the scores are on their way
        elif transfer.state is _State.CANCELLED:
            return self._on_total(message.transfer_id, message.atoms, 0, now)
        else:
            self._await_atoms(transfer, now, self._timeouts.lost_writes_s)
        return [_prefill_times(message)]

    def _on_failed(self, message: Failed, now: float) -> list[DecodeAction]:
        """Failed writes end the link, which is then the fault; else it is this transfer's."""
        actions: list[DecodeAction] = []
        transfer = self._transfers.get(message.transfer_id)
        if transfer is not None and transfer.state is _State.COUNTING:
            transfer.state = _State.CANCELLED
            error = TransferFailed(f"the KV transfer failed on the prefiller: {message.reason}")
            fault = None if message.failed else Fault.POST_FAILED
            actions.append(Lost(message.transfer_id, error, fault))
        return actions + self._on_total(message.transfer_id, message.atoms, message.failed, now)

    def _on_total(
        self, transfer_id: int, atoms: int, failed: int, now: float
    ) -> list[DecodeAction]:
        """The peer will post nothing more for this transfer."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.state is _State.READY:
            del self._transfers[transfer_id]
        if transfer is None or transfer.state in _TOTAL_IS_NEWS_NO_MORE:
            return []
        if failed or atoms > transfer.atoms:
            reason = f"{failed} of {atoms} writes of transfer {transfer_id} failed"
            return [EndLink(reason, Fault.DATA_PATH if failed else Fault.PROTOCOL)]
        transfer.state = _State.DRAINING
        transfer.atoms = atoms
        self._await_atoms(transfer, now, self._timeouts.lost_writes_s)
        return [Retarget(transfer.slot, transfer.generation, atoms)]

    def _await_atoms(self, transfer: _Transfer, now: float, patience_s: float) -> None:
        transfer.deadline, transfer.patience_s = now + patience_s, patience_s
        transfer.behind = self._num_started

    def _settle(self, transfer: _Transfer, proof: Proof) -> list[DecodeAction]:
        self._forget_slot(transfer)
        return [
            Release(transfer.slot, transfer.generation),
            Settled(transfer.transfer_id, proof),
        ]

    def _forget_slot(self, transfer: _Transfer) -> None:
        del self._by_slot[transfer.slot, transfer.generation]
        self._slots.give_back(transfer.slot)


def _overdue(transfer: _Transfer) -> EndLink:
    """What the link ends with when the transfer's clock has run out."""
    transfer_id = transfer.transfer_id
    match transfer.state:
        case _State.SCORING:
            reason = f"no scores came of the prompt of transfer {transfer_id}"
            return EndLink(reason, Fault.NO_SCORES)
        case _State.READY:
            reason = f"transfer {transfer_id} has come and is never done"
            return EndLink(reason, Fault.NO_LAST_WORD)
        case _State.CANCELLED:
            reason = f"no answer to the cancel of transfer {transfer_id}"
            return EndLink(reason, Fault.CANCEL_UNANSWERED)
        case _:
            reason = f"writes were lost: {transfer.ticked} of {transfer.atoms} atoms counted"
            return EndLink(reason, _missing_writes(transfer))


def _missing_writes(transfer: _Transfer) -> Fault:
    if transfer.ticked == transfer.atoms:
        return Fault.LOST_COMPLETION
    was_posted = transfer.posted or transfer.state is _State.DRAINING
    return Fault.LOST_WRITES if was_posted else Fault.STALLED_WRITES


def _prefill_times(posted: Posted) -> PrefillTimes:
    return PrefillTimes(
        posted.transfer_id,
        posted.prefill_start_ns,
        posted.last_layer_ns,
        posted.posted_ns,
        tuple(posted.chunks),
    )


def _link_lost(reason: str) -> RequestError:
    return TransferFailed(f"the prefiller was lost: {reason}", hint="try again")


def _rejection(message: Reject) -> RequestError:
    error = RequestError(message.message)
    error.http_status = message.http_status
    error.kind = message.kind
    return error
