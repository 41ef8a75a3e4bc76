"""DecodeSide by itself: what each message, tick and count leads to."""

from __future__ import annotations

import msgspec
import pytest

from pdx.errors import ProtocolError
from pdx.kv.pages import Proof
from pdx.messenger.actions import (
    Arm,
    Cached,
    EndLink,
    Lost,
    PrefillTimes,
    Retarget,
    Send,
    Settled,
)
from pdx.messenger.decode_side import DecodeSide, TransferTimeouts
from pdx.messenger.messages import (
    Cancel,
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
from pdx.metrics.faults import Fault
from pdx.request.ids import IdArray
from tests.messenger.protocol_world import LAYOUT, chunk, started


def test_drained_alone_settles_nothing() -> None:
    side, message = started(SlotTable())
    side.cancel(1, 0.0)
    actions = side.on_message(Drained(transfer_id=1, atoms=4, failed=0), 0.0)
    assert actions == [Retarget(message.slot, message.generation, 4)]
    assert side.on_arrived(message.slot, message.generation)[-1] == Settled(1, Proof.DRAINED)


def test_posted_is_no_sign_of_readiness() -> None:
    side, _ = started(SlotTable())
    actions = side.on_message(
        Posted(transfer_id=1, atoms=6, prefill_start_ns=1, last_layer_ns=2), 0.0
    )
    assert [type(action) for action in actions] == [PrefillTimes]


@pytest.mark.parametrize(("posted_ns", "outlasts"), [(0, False), (30, False), (31, True)])
def test_a_transfer_that_outlasts_its_prefill_is_told(posted_ns: int, outlasts: bool) -> None:
    times = PrefillTimes(1, prefill_start_ns=10, last_layer_ns=20, posted_ns=posted_ns)
    assert times.transfer_outlasts_prefill is outlasts


def test_a_found_prefix_is_told_while_the_transfer_is_known() -> None:
    side, _ = started(SlotTable())
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
    actions = side.on_chunk(7, chunk(8, 11, last=True, pages=(9, 8, 7), pass_idx=5), 0)
    assert Send(PrefixFound(transfer_id=7, num_tokens=8)) in actions
    armed = [(a.pass_idx, a.batches[0].batch) for a in actions if isinstance(a, Arm)]
    assert [pass_idx for pass_idx, _ in armed] == [4, 5]
    assert [batch.src_pages.tolist() for _, batch in armed] == [[8], [7]]
    assert [batch.dst_pages.tolist() for _, batch in armed] == [[3], [1]]


def test_writes_that_stall_after_the_prompt_is_computed_end_the_link() -> None:
    side, message = started(SlotTable())
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
    side.start_transfer(
        msgspec.structs.replace(first, transfer_id=transfer_id, slot=slot, generation=generation)
    )
    return slot, generation


@pytest.mark.parametrize(("posted", "patience_s"), [(False, 10.0), (True, 2.5)])
def test_a_transfer_waits_for_those_asked_for_before_it_was_computed_but_for_no_later_one(
    posted: bool, patience_s: float
) -> None:
    """Their writes may be in the way of its own: a prefiller computes short prompts first."""
    slots = SlotTable()
    side, first = started(slots)
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
    side, first = started(slots)
    last = _start_another(side, slots, first, 2)
    side.on_message(Sealed(transfer_id=2), 0.0)
    side.on_message(Posted(transfer_id=1, atoms=6, prefill_start_ns=1, last_layer_ns=2), 9.8)
    side.on_arrived(first.slot, first.generation)
    assert side.on_tick(9.9, {last: 0}) == []
    assert side.on_tick(19.8, {last: 0}) == []
    assert isinstance(side.on_tick(19.9, {last: 0})[0], EndLink)


def test_posted_takes_the_clock_for_stalled_writes_over() -> None:
    side, message = started(SlotTable())
    side.on_message(Sealed(transfer_id=1), 0.0)
    side.on_message(Posted(transfer_id=1, atoms=6, prefill_start_ns=1, last_layer_ns=2), 5.0)
    side.on_message(Sealed(transfer_id=1), 5.1)
    pair = (message.slot, message.generation)
    assert side.on_tick(7.4, {pair: 0}) == []
    assert isinstance(side.on_tick(7.5, {pair: 0})[0], EndLink)


@pytest.mark.parametrize("settled_by", ["count", "cancel"])
def test_a_transfer_that_needs_no_clock_starts_none_when_it_is_computed(settled_by: str) -> None:
    side, message = started(SlotTable())
    if settled_by == "count":
        side.on_arrived(message.slot, message.generation)
    else:
        side.cancel(1, 0.0)
    before = side.watched()
    assert side.on_message(Sealed(transfer_id=1), 0.0) == []
    assert side.on_message(Sealed(transfer_id=77), 0.0) == []
    assert side.watched() == before
    assert side.on_tick(9.9, {}) == []


def test_a_clock_that_has_run_out_is_seen_behind_one_that_has_not() -> None:
    """Clocks are no queue: whichever runs out first counts, whatever its place."""
    slots = SlotTable()
    side, first = started(slots)
    slot, generation = slots.take() or (0, 0)
    side.start_transfer(
        msgspec.structs.replace(first, transfer_id=2, slot=slot, generation=generation)
    )
    side.cancel(1, 0.0)
    side.on_message(Posted(transfer_id=2, atoms=6, prefill_start_ns=1, last_layer_ns=2), 0.0)
    [ended] = side.on_tick(2.5, {})
    assert ended == EndLink("writes were lost: 0 of 6 atoms counted", Fault.LOST_WRITES)


def test_writes_lost_after_posted_end_the_link_and_only_the_fence_settles() -> None:
    side, message = started(SlotTable())
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
    side, message = started(SlotTable())
    if cancels:
        side.cancel(1, 0.0)
    side.on_arrived(message.slot, message.generation)
    assert side.on_tick(20.0, {}) == [], "the clock starts with the count"
    assert side.on_tick(29.0, {}) == []
    assert isinstance(side.on_tick(30.0, {})[0], EndLink)
    assert side.on_link_end("never done") == [], "the request has its KV cache"


def test_the_last_word_ends_a_transfer_that_was_cancelled_and_came_all_the_same() -> None:
    side, message = started(SlotTable())
    side.cancel(1, 0.0)
    side.on_arrived(message.slot, message.generation)
    assert side.on_message(Drained(transfer_id=1, atoms=6, failed=0), 1.0) == []
    assert side.is_idle


def test_scores_that_do_not_come_end_the_link_and_lose_the_request() -> None:
    side, message = started(SlotTable(), prompt_logprobs=0)
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
    side, _ = started(slots)
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
    side.on_chunk(7, chunk(0, 4, last=True, pages=(0,)), 0)
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
    side, _ = started(SlotTable())
    assert side.cancel(1, 0.0) == [Send(Cancel(transfer_id=1))]
    assert side.cancel(1, 1.0) == [], "it is cancelled already"
    assert side.on_tick(9.9, {}) == []
    assert side.on_tick(10.0, {}) == [
        EndLink("no answer to the cancel of transfer 1", Fault.CANCEL_UNANSWERED)
    ]


def test_what_a_prefiller_says_of_no_transfer_or_against_its_word_is_seen() -> None:
    side, message = started(SlotTable())
    reject = Reject(transfer_id=77, http_status=503, kind="k", message="m")
    posted = Posted(transfer_id=77, atoms=6, prefill_start_ns=1, last_layer_ns=2)
    assert side.on_message(reject, 0.0) == []
    assert side.on_message(posted, 0.0) == []
    wrong = msgspec.structs.replace(posted, transfer_id=1, atoms=5)
    assert side.on_message(wrong, 0.0) == [
        EndLink("the peer posted 5 atoms, not 6", Fault.PROTOCOL)
    ]
    side.on_arrived(message.slot, message.generation)
    with pytest.raises(ProtocolError, match="rejected after it had begun"):
        side.on_message(msgspec.structs.replace(reject, transfer_id=1), 0.0)


def test_posted_may_come_while_scores_or_a_cancel_are_under_way() -> None:
    posted = Posted(transfer_id=1, atoms=6, prefill_start_ns=1, last_layer_ns=2)
    side, message = started(SlotTable(), prompt_logprobs=0)
    side.on_arrived(message.slot, message.generation)
    assert [type(a) for a in side.on_message(posted, 0.0)] == [PrefillTimes]
    side, message = started(SlotTable())
    side.cancel(1, 0.0)
    assert side.on_message(posted, 0.0) == [Retarget(message.slot, message.generation, 6)]
