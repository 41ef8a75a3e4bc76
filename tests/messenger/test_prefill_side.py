"""PrefillSide by itself: what each message and chunk leads to."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from pdx.errors import ProtocolError
from pdx.messenger.actions import (
    Accept,
    Arm,
    CancelSend,
    Dropped,
    HoldSource,
    OpenSend,
    PrefillAction,
    Send,
)
from pdx.messenger.messages import (
    Cancel,
    Drained,
    Prefill,
    Reject,
    Sealed,
)
from pdx.messenger.prefill_side import PrefillSide
from pdx.messenger.slots import SlotTable
from pdx.request.ids import IdArray
from tests.messenger.protocol_world import LAYERS, LAYOUT, PAGE, chunk, started


def prefilling() -> tuple[PrefillSide, Prefill]:
    """A prefiller that was asked for eight tokens in two pages."""
    _, message = started(SlotTable())
    message = msgspec.structs.replace(message, token_ids=IdArray([1] * 8))
    side = PrefillSide(src=LAYOUT, dst=LAYOUT)
    assert side.on_message(message) == [Accept(message)]
    return side, message


def next_chunk(side: PrefillSide, start: int, end: int, *, last: bool) -> list[PrefillAction]:
    return side.on_chunk(1, chunk(start, end, last=last, pages=(0, 1)), 5)


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
                chunk(
                    0, num_tokens, last=True, pages=tuple(range(num_tokens // PAGE)), pass_idx=slot
                ),
                0,
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
