"""Armed batches: a layer goes when the progress word says so, never before, and several at once."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from pdx.errors import FabricError
from tests.fabric.batches import dense
from tests.fabric.sides import join

LAYERS = 6
PAGES = [0, 2, 3, 5]
LAYER_BYTES = 64 * 1024


def test_layers_are_posted_when_they_are_due_and_not_before(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    pair.here.fill(1)
    pair.there.call("expect", there, 7, 1, LAYERS * len(PAGES))
    transfer = pair.here.fabric.open_transfer(here, 7, 1)
    pair.here.progress(99)
    pair.here.arm(transfer, dense(PAGES, PAGES, 1024, LAYERS, 64), first_value=100)
    pair.here.fabric.seal(transfer)
    assert pair.there.call("count", 7, 1) == 0
    for value, layers in ((100, 1), (101, 2), (104, 5)):
        pair.here.progress(value)
        pair.there.wait_count(7, 1, layers * len(PAGES))
        later = pair.there.read(layers * LAYER_BYTES, (LAYERS - layers) * LAYER_BYTES)
        assert not any(later)
    assert pair.there.call("count", 7, 1) == 5 * len(PAGES)
    assert not pair.here.pending()
    before = pair.now_ns()
    pair.here.progress(1000)
    pair.there.wait("Arrived", slot=7)
    done = pair.here.wait("TransferDone")
    assert done.posted_atoms == LAYERS * len(PAGES)
    assert before <= done.last_progress_ns <= pair.now_ns()
    assert done.first_post_ns < before
    page = pair.there.read(5 * LAYER_BYTES + 2 * 1024, 1024)
    assert page == pair.here.read(5 * LAYER_BYTES + 2 * 1024, 1024)


def test_a_batch_armed_late_goes_at_once(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    pair.there.call("expect", there, 7, 1, LAYERS)
    transfer = pair.here.fabric.open_transfer(here, 7, 1)
    pair.here.progress(1 << 60)
    pair.here.arm(transfer, dense([1], [1], 1024, LAYERS, 64), first_value=5)
    pair.there.wait("Arrived")


def test_chunks_of_one_transfer_follow_one_word(pair: Any) -> None:
    """The next pass may be armed while this one runs; a due batch overtakes an older one."""
    here, there = join(pair.here, pair.there)
    pair.there.call("expect", there, 7, 1, 2 * LAYERS + 1)
    transfer = pair.here.fabric.open_transfer(here, 7, 1)
    pair.here.arm(transfer, dense([1], [1], 1024, LAYERS, 64), first_value=10)
    pair.here.arm(transfer, dense([2], [2], 1024, LAYERS, 64), first_value=20)
    pair.here.fabric.write(transfer, dense([3], [3], 1024, 1, 64))
    pair.there.wait_count(7, 1, 1)
    pair.here.progress(20)
    pair.there.wait_count(7, 1, LAYERS + 2)
    pair.here.progress(25)
    pair.there.wait("Arrived", atoms=2 * LAYERS + 1)
    pair.here.fabric.seal(transfer)
    assert pair.here.wait("TransferDone").posted_atoms == 2 * LAYERS + 1


def test_what_is_armed_before_the_link_is_up_waits_for_it(pair: Any) -> None:
    here, here_descriptor = pair.here.open_link()
    there, there_descriptor = pair.there.open_link()
    pair.here.fabric.connect(here, there_descriptor)
    transfer = pair.here.fabric.open_transfer(here, 7, 1)
    pair.here.progress(3)
    pair.here.arm(transfer, dense([1], [1], 1024, 3, 64), first_value=1)
    pair.there.call("expect", there, 7, 1, 3)
    pair.there.call("connect", there, here_descriptor)
    pair.there.wait("Arrived")


def test_a_word_that_is_not_aligned_is_refused(pair: Any) -> None:
    here, _ = join(pair.here, pair.there)
    transfer = pair.here.fabric.open_transfer(here, 7, 1)
    batch = dense([1], [1], 1024, 1, 64)
    for address in (0, pair.here.word_address + 4):
        with pytest.raises(FabricError, match="aligned"):
            pair.here.fabric.arm(transfer, batch, word_address=address, first_value=1)
    with pytest.raises(FabricError, match="unsigned"):
        pair.here.arm(transfer, batch, first_value=-1)


def test_many_words_of_many_transfers(pair: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    here, there = join(pair.here, pair.there)
    transfers = {}
    for slot in range(1, 41):
        pair.there.call("expect", there, slot, 2, LAYERS)
        transfers[slot] = pair.here.fabric.open_transfer(here, slot, 2)
        batch = dense([slot], [slot], 1024, LAYERS, 64)
        pair.here.arm(transfers[slot], batch, first_value=int(rng.integers(1, 50)))
        pair.here.fabric.seal(transfers[slot])
    for value in range(1, 60):
        pair.here.progress(value)
    for slot, transfer in transfers.items():
        pair.there.wait("Arrived", slot=slot, atoms=LAYERS)
        pair.here.wait("TransferDone", transfer=transfer, posted_atoms=LAYERS)


def test_wakeups_are_added_and_removed(pair: Any) -> None:
    wakeup = os.eventfd(0)
    pair.here.fabric.add_wakeup(wakeup)
    pair.here.fabric.remove_wakeup(wakeup)
    with pytest.raises(FabricError, match="was not added"):
        pair.here.fabric.remove_wakeup(wakeup)
    os.close(wakeup)
