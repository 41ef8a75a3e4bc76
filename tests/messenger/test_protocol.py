"""Both state machines together over a fabric that reorders, delays, overtakes and loses: no page is
settled too early.

The fabric here is the worst one that the measured providers allow: a write is complete at its
sender as soon as it is posted, lands at any later time, in any order, or (after a TCP reset) never;
only a fence stops what has been posted.
"""

from __future__ import annotations

import random
import tracemalloc
from collections import deque
from dataclasses import dataclass, field

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from pdx.errors import CapacityError, ProtocolError
from pdx.kv.layout import KvLayout, NodeLayout
from pdx.kv.pages import Proof
from pdx.messenger.actions import (
    Accept,
    Arm,
    Cached,
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
    Cancel,
    ControlMessage,
    Drained,
    Posted,
    Prefill,
    PrefixFound,
    PromptLogprobs,
    Refuse,
    Reject,
    Sealed,
)
from pdx.messenger.prefill_side import PrefillSide
from pdx.messenger.slots import SlotTable
from pdx.request.batch import ScoredToken
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
        self.on_decode(self.decode.start(message))

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
                pass_idx=1,
                start=start,
                end=job.done,
                last=job.done == job.num_tokens,
                src_page_indices=tuple(range(8)),
                now_ns=0,
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


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    may_fail=st.booleans(),
    may_lose=st.booleans(),
    end_early=st.booleans(),
)
def test_any_history_settles_everything_and_never_too_early(
    seed: int, may_fail: bool, may_lose: bool, end_early: bool
) -> None:
    world = World(random.Random(seed), may_fail, may_lose)
    for transfer_id in range(1, 13):
        world.start(transfer_id)
        for _ in range(world.rng.randint(0, 25)):
            world.turn()
        if world.rng.random() < 0.3:
            world.cancel()
    if end_early:
        world.end_link()
    for _ in range(6000):
        world.turn()
        if world.rng.random() < 0.05:
            world.tick()
    assert world.settled.keys() == world.pairs.keys()
    assert world.slots.num_taken == 0 and world.decode.num_open == 0
    assert not any(job.held for job in world.jobs.values()), "source pages are pinned for ever"
    for transfer_id in world.pairs:
        assert transfer_id in world.outcome or transfer_id in world.cancelled
    if not (may_fail or may_lose or end_early):
        assert not world.ended, "a healthy link was ended"


def _started(slots: SlotTable, prompt_logprobs: int | None = None) -> tuple[DecodeSide, Prefill]:
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
    assert side.start(message)[0] == Expect(pair[0], pair[1], 6), "arm before dispatch"
    return side, message


def test_drained_alone_settles_nothing() -> None:
    side, message = _started(SlotTable())
    side.cancel(1, 0.0)
    actions = side.on_message(Drained(transfer_id=1, atoms=4, failed=0), 0.0)
    assert actions == [Retarget(message.slot, message.generation, 4)]
    assert side.on_arrived(message.slot, message.generation)[-1] == Settled(1, Proof.DRAINED)


def test_posted_is_no_sign_of_readiness() -> None:
    side, _ = _started(SlotTable())
    actions = side.on_message(
        Posted(transfer_id=1, atoms=6, prefill_start_ns=1, last_layer_ns=2), 0.0
    )
    assert [type(action) for action in actions] == [PrefillTimes]


@pytest.mark.parametrize(("posted_ns", "outlasts"), [(0, False), (30, False), (31, True)])
def test_a_transfer_that_outlasts_its_prefill_is_told(posted_ns: int, outlasts: bool) -> None:
    times = PrefillTimes(1, prefill_start_ns=10, last_layer_ns=20, posted_ns=posted_ns)
    assert times.transfer_outlasts_prefill is outlasts


def test_a_found_prefix_is_told_while_the_transfer_is_known() -> None:
    side, _ = _started(SlotTable())
    found = PrefixFound(transfer_id=1, num_tokens=4)
    assert side.on_message(found, 0.0) == [Cached(1, 4)]
    side.on_message(Reject(transfer_id=1, http_status=503, kind="k", message="m"), 0.0)
    assert side.on_message(found, 0.0) == []


def test_what_a_prefix_cache_holds_is_armed_for_the_pass_before() -> None:
    side = PrefillSide(src=LAYOUT, dst=LAYOUT)
    message = Prefill(
        transfer_id=7,
        token_ids=IdArray([1] * 11),
        first_position=4,
        page_indices=IdArray([3, 1]),
        slot=1,
        generation=0,
        atoms_by_rank=[6],
    )
    side.on_message(message)
    actions = side.on_chunk(
        7, pass_idx=5, start=8, end=11, last=True, src_page_indices=(9, 8, 7), now_ns=0
    )
    assert Send(PrefixFound(transfer_id=7, num_tokens=8)) in actions
    armed = [(a.pass_idx, a.batches[0].batch) for a in actions if isinstance(a, Arm)]
    assert [pass_idx for pass_idx, _ in armed] == [4, 5]
    assert [batch.src_pages.tolist() for _, batch in armed] == [[8], [7]]
    assert [batch.dst_pages.tolist() for _, batch in armed] == [[3], [1]]


def test_writes_that_stall_after_the_prompt_is_computed_end_the_link() -> None:
    side, message = _started(SlotTable())
    pair = (message.slot, message.generation)
    assert side.watched() == []
    assert side.on_message(Sealed(transfer_id=1), 0.0) == []
    assert side.watched() == [pair]
    assert side.on_tick(9.0, {pair: 5}) == []
    assert side.on_tick(18.9, {pair: 5}) == [], "atoms still came in"
    assert isinstance(side.on_tick(19.0, {pair: 5})[0], EndLink)


def _start_another(
    side: DecodeSide, slots: SlotTable, first: Prefill, transfer_id: int
) -> tuple[int, int]:
    slot, generation = slots.take() or (0, 0)
    side.start(
        msgspec.structs.replace(first, transfer_id=transfer_id, slot=slot, generation=generation)
    )
    return slot, generation


@pytest.mark.parametrize(("posted", "patience_s"), [(False, 10.0), (True, 2.5)])
def test_a_transfer_waits_for_those_asked_for_before_it_was_computed_but_for_no_later_one(
    posted: bool, patience_s: float
) -> None:
    """Their writes may be in the way of its own: a prefiller computes short prompts first."""
    slots = SlotTable()
    side, first = _started(slots)
    one = (first.slot, first.generation)
    two, three = (_start_another(side, slots, first, transfer_id) for transfer_id in (2, 3))
    side.on_message(Sealed(transfer_id=2), 0.0)
    if posted:
        side.on_message(Posted(transfer_id=2, atoms=6, prefill_start_ns=1, last_layer_ns=2), 0.0)
    four = _start_another(side, slots, first, 4)
    assert set(side.watched()) == {one, two, three, four}
    now, counts = 0.0, {one: 0, two: 0, three: 0, four: 0}
    for pair in (one, two, three):
        now += 0.9 * patience_s
        counts = counts | {pair: counts[pair] + 1}
        assert side.on_tick(now, counts) == []
    counts = counts | {four: 1}
    assert isinstance(side.on_tick(now + patience_s, counts)[0], EndLink)


def test_a_transfer_that_comes_whole_between_two_ticks_was_in_the_way_too() -> None:
    slots = SlotTable()
    side, first = _started(slots)
    last = _start_another(side, slots, first, 2)
    side.on_message(Sealed(transfer_id=2), 0.0)
    side.on_message(Posted(transfer_id=1, atoms=6, prefill_start_ns=1, last_layer_ns=2), 9.8)
    side.on_arrived(first.slot, first.generation)
    assert side.on_tick(9.9, {last: 0}) == []
    assert side.on_tick(19.8, {last: 0}) == []
    assert isinstance(side.on_tick(19.9, {last: 0})[0], EndLink)


def test_posted_takes_the_clock_for_stalled_writes_over() -> None:
    side, message = _started(SlotTable())
    side.on_message(Sealed(transfer_id=1), 0.0)
    side.on_message(Posted(transfer_id=1, atoms=6, prefill_start_ns=1, last_layer_ns=2), 5.0)
    side.on_message(Sealed(transfer_id=1), 5.1)
    pair = (message.slot, message.generation)
    assert side.on_tick(7.4, {pair: 0}) == []
    assert isinstance(side.on_tick(7.5, {pair: 0})[0], EndLink)


@pytest.mark.parametrize("settled_by", ["count", "cancel"])
def test_a_transfer_that_needs_no_clock_starts_none_when_it_is_computed(settled_by: str) -> None:
    side, message = _started(SlotTable())
    if settled_by == "count":
        side.on_arrived(message.slot, message.generation)
    else:
        side.cancel(1, 0.0)
    before = side.watched()
    assert side.on_message(Sealed(transfer_id=1), 0.0) == []
    assert side.on_message(Sealed(transfer_id=77), 0.0) == []
    assert side.watched() == before
    assert side.on_tick(9.9, {}) == []


def test_b5_a_clock_that_has_run_out_is_seen_behind_one_that_has_not() -> None:
    """Clocks are no queue: whichever runs out first counts, whatever its place."""
    slots = SlotTable()
    side, first = _started(slots)
    slot, generation = slots.take() or (0, 0)
    side.start(msgspec.structs.replace(first, transfer_id=2, slot=slot, generation=generation))
    side.cancel(1, 0.0)
    side.on_message(Posted(transfer_id=2, atoms=6, prefill_start_ns=1, last_layer_ns=2), 0.0)
    [ended] = side.on_tick(2.5, {})
    assert ended == EndLink("writes were lost: 0 of 6 atoms counted")


def test_writes_lost_after_posted_end_the_link_and_only_the_fence_settles() -> None:
    side, message = _started(SlotTable())
    side.on_message(Posted(transfer_id=1, atoms=6, prefill_start_ns=1, last_layer_ns=2), 0.0)
    pair = (message.slot, message.generation)
    assert side.on_tick(2.4, {pair: 5}) == []
    assert side.on_tick(2.5, {pair: 5}) == [], "atoms still came in"
    assert isinstance(side.on_tick(5.1, {pair: 5})[0], EndLink)
    assert [type(a) for a in side.on_link_end("lost")] == [Lost]
    assert side.on_arrived(*pair) == [], "a count that completes after the end is void"
    assert side.on_fenced() == [Settled(1, Proof.FENCED)]


@pytest.mark.parametrize("cancels", [False, True])
def test_a_prefiller_that_is_never_done_with_what_has_come_loses_its_link(cancels: bool) -> None:
    """Found by the simulator: lost completions would pin its pages for ever."""
    side, message = _started(SlotTable())
    if cancels:
        side.cancel(1, 0.0)
    side.on_arrived(message.slot, message.generation)
    assert side.on_tick(20.0, {}) == [], "the clock starts with the count"
    assert side.on_tick(29.0, {}) == []
    assert isinstance(side.on_tick(30.0, {})[0], EndLink)
    assert side.on_link_end("never done") == [], "the request has its KV cache"


def test_the_last_word_ends_a_transfer_that_was_cancelled_and_came_all_the_same() -> None:
    side, message = _started(SlotTable())
    side.cancel(1, 0.0)
    side.on_arrived(message.slot, message.generation)
    assert side.on_message(Drained(transfer_id=1, atoms=6, failed=0), 1.0) == []
    assert side.is_idle


def test_scores_that_do_not_come_end_the_link_and_lose_the_request() -> None:
    side, message = _started(SlotTable(), prompt_logprobs=0)
    side.on_arrived(message.slot, message.generation)
    scores = PromptLogprobs(transfer_id=1, first_position=1, tokens=[], last=False)
    assert side.on_tick(100.0, {}) == [], "the clock starts with the count"
    assert side.on_tick(159.0, {}) == []
    side.on_message(scores, 159.0)
    assert side.on_tick(161.0, {}) == [], "some scores came: the clock starts again"
    assert side.on_tick(220.0, {}) == []
    assert isinstance(side.on_tick(221.0, {})[0], EndLink)
    assert [type(a) for a in side.on_link_end("no scores")] == [Lost]
    assert side.on_fenced() == [], "its pages went back when the count was complete"


def test_reject_gives_everything_back_with_the_peers_reason() -> None:
    slots = SlotTable()
    side, _ = _started(slots)
    actions = side.on_message(
        Reject(transfer_id=1, http_status=400, kind="invalid_request_error", message="too long"),
        0.0,
    )
    assert Settled(1, Proof.NOT_STARTED) in actions and slots.num_taken == 0
    lost = actions[-1]
    assert isinstance(lost, Lost) and lost.error.message == "too long"
    assert lost.error.http_status == 400


def test_cancel_of_a_finished_transfer_still_gets_its_totals() -> None:
    side = PrefillSide(src=LAYOUT, dst=LAYOUT)
    message = Prefill(
        transfer_id=7,
        token_ids=IdArray([1] * 4),
        first_position=0,
        page_indices=IdArray([3]),
        slot=1,
        generation=0,
        atoms_by_rank=[3],
    )
    side.on_message(message)
    side.on_chunk(7, pass_idx=1, start=0, end=4, last=True, src_page_indices=(0,), now_ns=0)
    side.on_send_done(7, posted=3, failed=0, last_progress_ns=0)
    assert side.on_message(Cancel(transfer_id=7)) == [
        Send(Drained(transfer_id=7, atoms=3, failed=0))
    ]


def test_a_side_refuses_messages_that_it_cannot_get() -> None:
    refusal = Refuse(reason="no")
    with pytest.raises(ProtocolError):
        DecodeSide(SlotTable(), TransferTimeouts()).on_message(refusal, 0.0)
    side = PrefillSide(src=LAYOUT, dst=LAYOUT)
    with pytest.raises(ProtocolError):
        side.on_message(refusal)


def test_an_unanswered_cancel_ends_the_link() -> None:
    side, _ = _started(SlotTable())
    assert side.cancel(1, 0.0) == [Send(Cancel(transfer_id=1))]
    assert side.cancel(1, 1.0) == [], "it is cancelled already"
    assert side.on_tick(9.9, {}) == []
    assert side.on_tick(10.0, {}) == [EndLink("no answer to the cancel of transfer 1")]


def test_what_a_prefiller_says_of_no_transfer_or_against_its_word_is_seen() -> None:
    side, message = _started(SlotTable())
    reject = Reject(transfer_id=77, http_status=503, kind="k", message="m")
    posted = Posted(transfer_id=77, atoms=6, prefill_start_ns=1, last_layer_ns=2)
    assert side.on_message(reject, 0.0) == []
    assert side.on_message(posted, 0.0) == []
    wrong = msgspec.structs.replace(posted, transfer_id=1, atoms=5)
    assert side.on_message(wrong, 0.0) == [EndLink("the peer posted 5 atoms, not 6")]
    side.on_arrived(message.slot, message.generation)
    with pytest.raises(ProtocolError, match="rejected after it had begun"):
        side.on_message(msgspec.structs.replace(reject, transfer_id=1), 0.0)


def test_posted_may_come_while_scores_or_a_cancel_are_under_way() -> None:
    posted = Posted(transfer_id=1, atoms=6, prefill_start_ns=1, last_layer_ns=2)
    side, message = _started(SlotTable(), prompt_logprobs=0)
    side.on_arrived(message.slot, message.generation)
    assert [type(a) for a in side.on_message(posted, 0.0)] == [PrefillTimes]
    side, message = _started(SlotTable())
    side.cancel(1, 0.0)
    assert side.on_message(posted, 0.0) == [Retarget(message.slot, message.generation, 6)]


def prefilling() -> tuple[PrefillSide, Prefill]:
    """A prefiller that was asked for eight tokens in two pages."""
    _, message = _started(SlotTable())
    message = msgspec.structs.replace(message, token_ids=IdArray([1] * 8))
    side = PrefillSide(src=LAYOUT, dst=LAYOUT)
    assert side.on_message(message) == [Accept(message)]
    return side, message


def next_chunk(side: PrefillSide, start: int, end: int, *, last: bool) -> list[PrefillAction]:
    return side.on_chunk(
        1, pass_idx=1, start=start, end=end, last=last, src_page_indices=(0, 1), now_ns=5
    )


def test_a_prompt_is_asked_for_once_and_for_what_the_plan_gives() -> None:
    side, message = prefilling()
    with pytest.raises(ProtocolError, match="transfer 1 is asked for twice"):
        side.on_message(message)
    wrong = msgspec.structs.replace(message, transfer_id=2, slot=2, atoms_by_rank=[7])
    [answer] = side.on_message(wrong)
    assert isinstance(answer, Send) and isinstance(answer.message, Reject)
    assert answer.message.http_status == 400
    assert side.num_open == 1


def test_nothing_is_armed_for_a_transfer_that_is_over() -> None:
    side, _ = prefilling()
    assert side.on_chunk_done(1, 0) == [], "it has no chunk yet"
    assert [type(a) for a in next_chunk(side, 0, 4, last=False)] == [HoldSource, OpenSend, Arm]
    [view] = side.views("d", "tcp")
    assert (view.state, view.num_armed, view.atoms) == ("open", 4, 6)
    assert side.on_chunk_done(1, 9) == [], "more is to come"
    assert side.on_message(Cancel(transfer_id=1)) == [Dropped(1), CancelSend(1)]
    assert side.on_message(Cancel(transfer_id=1)) == [], "it is cancelled already"
    assert next_chunk(side, 4, 8, last=True) == []
    assert side.on_chunk_done(1, 9) == []
    side.on_send_done(1, posted=0, failed=0, last_progress_ns=0)
    assert next_chunk(side, 4, 8, last=True) == []


def test_a_prompt_that_is_computed_is_told_until_it_is_posted() -> None:
    side, _ = prefilling()
    next_chunk(side, 0, 8, last=True)
    assert side.on_chunk_done(1, 9) == [Send(Sealed(transfer_id=1))]
    side.on_send_done(1, posted=6, failed=0, last_progress_ns=0)
    assert side.on_chunk_done(1, 9) == []


def test_what_is_kept_of_a_transfer_that_is_done_is_small() -> None:
    """A slot is used again after thousands of transfers, whose prompts would fill gigabytes."""
    side, num_tokens, num_transfers = PrefillSide(src=LAYOUT, dst=LAYOUT), 200, 200
    tracemalloc.start()
    try:
        for slot in range(1, num_transfers):
            side.on_message(
                Prefill(
                    transfer_id=slot,
                    token_ids=IdArray([1] * num_tokens),
                    first_position=0,
                    page_indices=IdArray(range(num_tokens // PAGE)),
                    slot=slot,
                    generation=0,
                    atoms_by_rank=[num_tokens // PAGE * LAYERS],
                )
            )
            side.on_chunk(
                slot,
                pass_idx=slot,
                start=0,
                end=num_tokens,
                last=True,
                src_page_indices=tuple(range(num_tokens // PAGE)),
                now_ns=0,
            )
            side.on_send_done(
                slot, posted=num_tokens // PAGE * LAYERS, failed=0, last_progress_ns=0
            )
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < num_transfers * 8 * num_tokens / 4
    [send] = side.on_message(Cancel(transfer_id=1))
    assert isinstance(send, Send) and isinstance(send.message, Drained)
    assert send.message.atoms == num_tokens // PAGE * LAYERS
