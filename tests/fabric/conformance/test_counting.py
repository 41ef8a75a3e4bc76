"""The receiver's count: armed pairs are counted, everything else is stale and changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdx.errors import FabricError
from tests.fabric.batches import dense
from tests.fabric.sides import join


def _send(side: Any, link: int, slot: int, generation: int, num_pages: int) -> None:
    """Write so many scattered pages and wait until all of them are on their way."""
    pages = list(range(0, 2 * num_pages, 2))
    transfer = side.call("open_transfer", link, slot, generation)
    side.call("write", transfer, dense(pages, pages, 64, 1, 4096))
    side.call("seal", transfer)
    side.wait("TransferDone", transfer=transfer)


def test_arrived_has_the_times_of_what_came(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    pair.there.call("expect", there, 5, 1, 60)
    _send(pair.here, here, 5, 1, 20)
    pair.there.wait_count(5, 1, 20)
    _send(pair.here, here, 5, 1, 40)
    arrived = pair.there.wait("Arrived", slot=5, generation=1, link=there)
    assert arrived.arrival_ns.dtype == np.int64
    assert (np.diff(arrived.arrival_ns) > 0).all()
    assert (np.diff(arrived.arrival_atoms.astype(int)) > 0).all()
    assert arrived.arrival_atoms[-1] == arrived.atoms == 60
    assert 20 in arrived.arrival_atoms


def test_the_log_of_a_long_transfer_is_thinned_and_stays_true(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    pair.there.call("expect", there, 5, 1, 700)
    for count in range(1, 701):
        _send(pair.here, here, 5, 1, 1)
        pair.there.wait_count(5, 1, count)
    arrived = pair.there.wait("Arrived", slot=5)
    assert 64 <= len(arrived.arrival_ns) <= 256
    assert (np.diff(arrived.arrival_ns) > 0).all()
    assert arrived.arrival_atoms[-1] == 700


def test_atoms_before_expect_are_never_credited(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    _send(pair.here, here, 5, 1, 8)
    pair.there.wait_statistic("stale_imms", 2)
    pair.there.call("expect", there, 5, 1, 8)
    assert pair.there.call("count", 5, 1) == 0
    _send(pair.here, here, 5, 1, 8)
    assert pair.there.wait("Arrived").atoms == 8


def test_a_stale_generation_is_dropped(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    pair.there.call("expect", there, 5, 1, 4)
    assert pair.there.call("release", 5, 1) == 0
    pair.there.call("expect", there, 5, 2, 4)
    _send(pair.here, here, 5, 1, 4)
    _send(pair.here, here, 6, 2, 4)
    pair.there.wait_statistic("stale_imms", 2)
    assert pair.there.call("count", 5, 2) == 0
    _send(pair.here, here, 5, 2, 4)
    assert pair.there.wait("Arrived", slot=5, generation=2).atoms == 4
    assert not pair.there.pending()


def test_generations_wrap(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    for generation in (4094, 4095, 0, 1):
        pair.there.call("expect", there, 4095, generation, 3)
        _send(pair.here, here, 4095, generation, 3)
        pair.there.wait("Arrived", slot=4095, generation=generation)
        assert pair.there.call("release", 4095, generation) == 3


def test_a_surplus_is_told_once(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    pair.there.call("expect", there, 5, 1, 4)
    _send(pair.here, here, 5, 1, 4)
    pair.there.wait("Arrived")
    _send(pair.here, here, 5, 1, 1)
    assert pair.there.wait("Surplus", slot=5, generation=1, link=there).count == 5
    _send(pair.here, here, 5, 1, 1)
    pair.there.wait_count(5, 1, 6)
    assert not pair.there.pending()
    assert pair.there.call("release", 5, 1) == 6
    assert pair.there.statistics().surplus_slots == 1


def test_a_write_beyond_the_expected_is_a_surplus_and_no_arrival(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    pair.there.call("expect", there, 5, 1, 3)
    _send(pair.here, here, 5, 1, 4)
    assert pair.there.wait("Surplus").count == 4
    assert not pair.there.pending()


def test_expecting_nothing_arrives_at_once(pair: Any) -> None:
    _, there = join(pair.here, pair.there)
    pair.there.call("expect", there, 5, 1, 0)
    arrived = pair.there.wait("Arrived", slot=5)
    assert (arrived.atoms, len(arrived.arrival_ns)) == (0, 0)


def test_an_armed_slot_is_not_armed_twice(pair: Any) -> None:
    _, there = join(pair.here, pair.there)
    pair.there.call("expect", there, 5, 1, 4)
    for generation in (1, 2):
        with pytest.raises(FabricError, match="armed already"):
            pair.there.call("expect", there, 5, generation, 4)
    pair.there.call("release", 5, 1)
    pair.there.call("expect", there, 5, 2, 4)


@pytest.mark.parametrize(("slot", "generation"), [(0, 1), (4096, 1), (-1, 1), (1, 4096), (1, -1)])
def test_pairs_out_of_range_are_refused(pair: Any, slot: int, generation: int) -> None:
    here, _ = join(pair.here, pair.there)
    with pytest.raises(FabricError, match="out of range"):
        pair.here.fabric.expect(here, slot, generation, 1)
    with pytest.raises(FabricError, match="out of range"):
        pair.here.fabric.open_transfer(here, slot, generation)


def test_pairs_that_are_not_armed_are_refused(pair: Any) -> None:
    here, _ = join(pair.here, pair.there)
    pair.here.fabric.expect(here, 5, 1, 4)
    for slot, generation in ((5, 2), (6, 1)):
        with pytest.raises(FabricError, match="not armed"):
            pair.here.fabric.release(slot, generation)
        with pytest.raises(FabricError, match="not armed"):
            pair.here.fabric.retarget(slot, generation, 1)
        with pytest.raises(FabricError, match="not armed"):
            pair.here.fabric.count(slot, generation)
    with pytest.raises(FabricError, match="not open"):
        pair.here.fabric.expect(here + 100, 7, 1, 4)


def test_retarget_waits_for_the_new_count(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    pair.there.call("expect", there, 5, 1, 100)
    _send(pair.here, here, 5, 1, 4)
    pair.there.wait_count(5, 1, 4)
    pair.there.call("retarget", 5, 1, 6)
    assert not pair.there.pending()
    _send(pair.here, here, 5, 1, 2)
    assert pair.there.wait("Arrived").atoms == 6


@pytest.mark.parametrize("posted", [0, 4])
def test_retarget_to_what_is_here_arrives_at_once(pair: Any, posted: int) -> None:
    here, there = join(pair.here, pair.there)
    pair.there.call("expect", there, 5, 1, 100)
    _send(pair.here, here, 5, 1, posted)
    pair.there.wait_count(5, 1, posted)
    pair.there.call("retarget", 5, 1, posted)
    assert pair.there.wait("Arrived").atoms == posted


def test_retarget_below_the_count_is_a_surplus(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    pair.there.call("expect", there, 5, 1, 100)
    _send(pair.here, here, 5, 1, 4)
    pair.there.wait_count(5, 1, 4)
    pair.there.call("retarget", 5, 1, 3)
    assert pair.there.wait("Surplus").count == 4


def test_a_fenced_links_slots_count_no_more(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    pair.there.call("expect", there, 5, 1, 4)
    _send(pair.here, here, 5, 1, 2)
    pair.there.wait_count(5, 1, 2)
    pair.there.call("fence", there)
    pair.there.call("retarget", 5, 1, 2)
    pair.there.wait("Fenced", link=there)
    assert not pair.there.pending()
    assert pair.there.call("release", 5, 1) == 2
    with pytest.raises(FabricError, match="not open"):
        pair.there.call("expect", there, 6, 1, 4)
