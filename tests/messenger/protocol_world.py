"""Both state machines over the worst fabric that the measured providers allow, and what tests of
one of them begin with.

A write is complete at its sender as soon as it is posted, lands at any later time, in any order, or
(after a TCP reset) never; only a fence stops what has been posted.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from pdx.errors import CapacityError
from pdx.kv.layout import KvLayout, NodeLayout
from pdx.kv.pages import Proof
from pdx.messenger.actions import (
    Accept,
    Arm,
    CancelSend,
    Counted,
    DecodeAction,
    Dropped,
    EndLink,
    Expect,
    HoldSource,
    Lost,
    OpenSend,
    PrefillAction,
    PrefillTimes,
    Ready,
    Release,
    ReleaseSource,
    Retarget,
    Scores,
    Seal,
    Send,
    Settled,
)
from pdx.messenger.decode_side import DecodeSide, TransferTimeouts
from pdx.messenger.messages import (
    ControlMessage,
    Prefill,
)
from pdx.messenger.prefill_side import PrefillSide
from pdx.messenger.slots import SlotTable
from pdx.request.batch import ScoredToken
from pdx.request.chunk import PrefillChunk
from pdx.request.ids import IdArray

PAGE, LAYERS, CHUNK, DST_PAGES = 4, 3, 8, 64
LAYOUT = NodeLayout(
    rank=KvLayout(
        num_layers=LAYERS,
        num_kv_heads=2,
        head_dim=8,
        page_size=PAGE,
        num_pages=DST_PAGES,
        itemsize=2,
    ),
    tp_size=1,
    num_kv_heads=2,
)


def chunk(
    start: int, end: int, *, last: bool, pages: tuple[int, ...], pass_idx: int = 1
) -> PrefillChunk:
    """Positions of a prompt that a pass computes."""
    return PrefillChunk(
        request_id=1, pass_idx=pass_idx, start=start, end=end, last=last, page_indices=pages
    )


def started(slots: SlotTable, prompt_logprobs: int | None = None) -> tuple[DecodeSide, Prefill]:
    """A decoder that has just asked for eight tokens in two pages."""
    pair = slots.take()
    assert pair is not None
    message = Prefill(
        transfer_id=1,
        token_ids=IdArray([1] * 8),
        first_position=0,
        page_indices=IdArray([0, 1]),
        slot=pair[0],
        generation=pair[1],
        atoms_by_rank=[6],
        prompt_logprobs=prompt_logprobs,
    )
    side = DecodeSide(slots, TransferTimeouts())
    assert side.start_transfer(message)[0] == Expect(pair[0], pair[1], 6), "arm before dispatch"
    return side, message


@dataclass
class Job:
    """A prompt in the prefiller's engine."""

    num_tokens: int
    done: int = 0
    held: bool = False
    posted: int = 0
    failed: int = 0
    to_post: int = 0
    sealed: bool = False
    cancelled: bool = False
    send_open: bool = False


@dataclass
class World:
    """One link and its two engines, driven by a seeded random choice of what happens next."""

    rng: random.Random
    may_fail: bool
    may_lose: bool
    slots: SlotTable = field(
        default_factory=lambda: SlotTable(num_slots=9, num_generations=4, num_free_kept=2)
    )
    now: float = 0.0
    to_prefill: deque[ControlMessage] = field(default_factory=deque)
    to_decode: deque[ControlMessage] = field(default_factory=deque)
    #: Posted and not yet landed: (transfer, slot, generation, atoms).
    in_flight: list[tuple[int, int, int, int]] = field(default_factory=list)
    armed: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)
    pairs: dict[int, tuple[int, int]] = field(default_factory=dict)
    outcome: dict[int, str] = field(default_factory=dict)
    settled: dict[int, Proof] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    #: Prompt tokens to be scored, by transfer, and how many have been.
    wants_scores: dict[int, int] = field(default_factory=dict)
    scored: dict[int, int] = field(default_factory=dict)
    ended: bool = False
    fenced: bool = False
    prefill_ended: bool = False

    def __post_init__(self) -> None:
        self.decode = DecodeSide(self.slots, TransferTimeouts(lost_writes_s=1.0, drain_s=10.0))
        self.prefill = PrefillSide(src=LAYOUT, dst=LAYOUT)

    # ---- decoder --------------------------------------------------------------------------

    def start(self, transfer_id: int) -> None:
        pair = self.slots.take()
        if pair is None or self.ended:
            if pair is not None:
                self.slots.give_back(pair[0])
            return
        num_tokens = self.rng.randint(1, 20)
        self.pairs[transfer_id] = pair
        pages = self.rng.sample(range(DST_PAGES), -(-num_tokens // PAGE))
        message = Prefill(
            transfer_id=transfer_id,
            token_ids=IdArray([1] * num_tokens),
            first_position=0,
            page_indices=IdArray(pages),
            slot=pair[0],
            generation=pair[1],
            atoms_by_rank=[len(pages) * LAYERS],
            prompt_logprobs=self.rng.choice([None, 0]),
            last_token_id=1,
        )
        if message.prompt_logprobs is not None:
            self.wants_scores[transfer_id] = num_tokens
        self.on_decode(self.decode.start_transfer(message))

    def on_decode(self, actions: list[DecodeAction]) -> None:
        for action in actions:
            match action:
                case Send(message=message):
                    self.to_prefill.append(message)
                case Expect(slot=slot, generation=generation, atoms=atoms):
                    assert (slot, generation) not in self.armed
                    self.armed[slot, generation] = [0, atoms]
                case Retarget(slot=slot, generation=generation, atoms=atoms):
                    self.armed[slot, generation][1] = atoms
                    self.check_count(slot, generation)
                case Release(slot=slot, generation=generation):
                    del self.armed[slot, generation]
                case EndLink():
                    self.end_link()
                case Settled(transfer_id=transfer_id, proof=proof):
                    self.on_settled(transfer_id, proof)
                case Ready(transfer_id=transfer_id):
                    assert not self.ended
                    self.on_outcome(transfer_id, "ready")
                    assert self.settled[transfer_id] is Proof.COUNTED
                    if transfer_id in self.wants_scores:
                        assert self.scored[transfer_id] == self.wants_scores[transfer_id]
                case Lost(transfer_id=transfer_id):
                    self.on_outcome(transfer_id, "lost")
                case PrefillTimes() | Counted():
                    pass
                case Scores(transfer_id=transfer_id, tokens=tokens):
                    assert transfer_id not in self.outcome
                    assert transfer_id not in self.cancelled
                    self.scored[transfer_id] = self.scored.get(transfer_id, 0) + len(tokens)

    def on_settled(self, transfer_id: int, proof: Proof) -> None:
        assert transfer_id not in self.settled, "settled twice"
        self.settled[transfer_id] = proof
        assert all(t != transfer_id for t, *_ in self.in_flight), "settled under a live write"
        job = self.jobs.get(transfer_id)
        assert self.fenced or job is None or not job.to_post, "settled before an armed write"

    def on_outcome(self, transfer_id: int, what: str) -> None:
        assert transfer_id not in self.outcome and transfer_id not in self.cancelled
        self.outcome[transfer_id] = what

    def cancel(self) -> None:
        open_ids = [t for t in self.pairs if t not in self.outcome and t not in self.cancelled]
        if open_ids:
            transfer_id = self.rng.choice(open_ids)
            self.cancelled.add(transfer_id)
            self.on_decode(self.decode.cancel(transfer_id, self.now))

    def check_count(self, slot: int, generation: int) -> None:
        count, target = self.armed[slot, generation]
        assert count <= target, "surplus"
        if count == target:
            self.on_decode(self.decode.on_arrived(slot, generation))

    def end_link(self) -> None:
        if not self.ended:
            self.ended = True
            self.on_decode(self.decode.on_link_end("test"))

    def fence(self) -> None:
        """The decoder's endpoint closes: what is in flight never lands, slots are disarmed."""
        if self.ended and not self.fenced:
            self.fenced = True
            self.in_flight.clear()
            self.armed.clear()
            self.on_decode(self.decode.on_fenced())

    # ---- prefiller ------------------------------------------------------------------------

    def on_prefill(self, actions: list[PrefillAction]) -> None:
        for action in actions:
            match action:
                case Send(message=message):
                    self.to_decode.append(message)
                case Accept(prefill=prefill):
                    transfer_id, token_ids = prefill.transfer_id, prefill.token_ids
                    if self.rng.random() < 0.1:
                        error = CapacityError("refused")
                        self.on_prefill(self.prefill.refuse(transfer_id, error))
                    else:
                        self.jobs[transfer_id] = Job(len(token_ids))
                case Dropped(transfer_id=transfer_id):
                    self.jobs[transfer_id].done = self.jobs[transfer_id].num_tokens
                case HoldSource(transfer_id=transfer_id):
                    self.jobs[transfer_id].held = True
                case ReleaseSource(transfer_id=transfer_id):
                    assert self.jobs[transfer_id].held
                    self.jobs[transfer_id].held = False
                case OpenSend(transfer_id=transfer_id):
                    self.jobs[transfer_id].send_open = True
                case Arm(transfer_id=transfer_id, batches=batches):
                    job = self.jobs[transfer_id]
                    assert job.held and not job.sealed
                    assert not job.cancelled or job.failed, "armed after it was cancelled"
                    if not job.cancelled:  # a failed transfer takes nothing more
                        job.to_post += sum(each.batch.num_atoms for each in batches)
                case Seal(transfer_id=transfer_id):
                    self.jobs[transfer_id].sealed = True
                case CancelSend(transfer_id=transfer_id):
                    self.jobs[transfer_id].cancelled = True
                    self.jobs[transfer_id].to_post = 0
                case EndLink():
                    raise AssertionError("the prefiller ended the link")

    def run_chunk(self) -> None:
        queued = [t for t, job in self.jobs.items() if job.done < job.num_tokens]
        if queued and not self.prefill_ended:
            transfer_id = self.rng.choice(queued)
            job = self.jobs[transfer_id]
            start, job.done = job.done, min(job.done + CHUNK, job.num_tokens)
            actions = self.prefill.on_chunk(
                transfer_id,
                chunk(start, job.done, last=job.done == job.num_tokens, pages=tuple(range(8))),
                0,
            )
            self.on_prefill(actions)
            if transfer_id in self.wants_scores:
                self.score(transfer_id, start, job)

    def score(self, transfer_id: int, start: int, job: Job) -> None:
        tokens = [ScoredToken(token_id=1, logprob=0.0, top=[])] * (job.done - start)
        last = job.done == job.num_tokens
        self.on_prefill(self.prefill.on_scores(transfer_id, start + 1, tokens, last=last))

    def post(self) -> None:
        """The worker posts some due atoms; some fail, some are lost without a word."""
        ready = [t for t, job in self.jobs.items() if job.to_post and job.send_open]
        if not ready:
            return
        transfer_id = self.rng.choice(ready)
        job = self.jobs[transfer_id]
        atoms = self.rng.randint(1, job.to_post)
        job.to_post -= atoms
        job.posted += atoms
        if self.may_fail and self.rng.random() < 0.1:
            job.failed += atoms
            job.cancelled, job.to_post = True, 0
            if self.rng.random() < 0.5:
                return
        if self.may_lose and self.rng.random() < 0.1:
            return
        if not self.fenced:
            self.in_flight.append((transfer_id, *self.pairs[transfer_id], atoms))

    def finish_send(self) -> None:
        over = [
            t
            for t, job in self.jobs.items()
            if job.send_open
            and not job.to_post
            and (job.sealed or job.cancelled or self.prefill_ended)
        ]
        if over:
            transfer_id = self.rng.choice(over)
            job = self.jobs[transfer_id]
            job.send_open = False
            actions = self.prefill.on_send_done(
                transfer_id, posted=job.posted, failed=job.failed, last_progress_ns=0
            )
            self.on_prefill(actions)

    def end_prefill(self) -> None:
        if self.ended and not self.prefill_ended:
            self.prefill_ended = True
            self.to_decode.clear()
            for job in self.jobs.values():
                job.to_post = 0
            self.on_prefill(self.prefill.on_link_end())

    # ---- network and time -----------------------------------------------------------------

    def land(self) -> None:
        if self.in_flight:
            index = self.rng.randrange(len(self.in_flight))
            transfer_id, slot, generation, atoms = self.in_flight.pop(index)
            assert transfer_id not in self.settled, "a write landed in settled pages"
            if (slot, generation) in self.armed:
                self.armed[slot, generation][0] += atoms
                self.check_count(slot, generation)

    def deliver_to_prefill(self) -> None:
        if self.to_prefill and not self.prefill_ended:
            self.on_prefill(self.prefill.on_message(self.to_prefill.popleft()))

    def deliver_to_decode(self) -> None:
        if self.to_decode and not self.ended:
            self.on_decode(self.decode.on_message(self.to_decode.popleft(), self.now))

    def tick(self) -> None:
        self.now += 0.4 if self.may_lose else 0.001
        counts = {pair: count for pair, (count, _) in self.armed.items()}
        if not self.ended:
            self.on_decode(self.decode.on_tick(self.now, counts))

    def turn(self) -> None:
        choices = [
            self.run_chunk,
            self.post,
            self.post,
            self.finish_send,
            self.land,
            self.land,
            self.deliver_to_prefill,
            self.deliver_to_decode,
            self.fence,
            self.end_prefill,
        ]
        self.rng.choice(choices)()
