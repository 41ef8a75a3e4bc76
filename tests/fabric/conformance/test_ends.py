"""How transfers and links end: seal, cancel, fence, and a peer that dies or stops."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pdx.errors import FabricError
from tests.fabric.batches import dense
from tests.fabric.sides import assert_serves, join

MIB = 1 << 20


def test_a_transfer_is_done_once_when_sealed_and_complete(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    pair.there.call("expect", there, 5, 1, 4)
    transfer = pair.here.fabric.open_transfer(here, 5, 1)
    pair.here.fabric.write(transfer, dense([0, 1, 2, 3], [0, 2, 4, 6], 64, 1, 16))
    pair.there.wait("Arrived")
    assert not pair.here.pending()
    pair.here.fabric.seal(transfer)
    done = pair.here.wait("TransferDone", transfer=transfer)
    assert (done.link, done.slot, done.generation, done.cancelled) == (here, 5, 1, False)
    for call in (pair.here.fabric.seal, pair.here.fabric.cancel):
        call(transfer)
    with pytest.raises(FabricError, match="no more batches"):
        pair.here.fabric.write(transfer, dense([0], [0], 64, 1, 16))
    assert not pair.here.pending()


def test_a_sealed_transfer_takes_no_batches(pair: Any) -> None:
    here, _ = join(pair.here, pair.there)
    transfer = pair.here.fabric.open_transfer(here, 5, 1)
    pair.here.arm(transfer, dense([0], [0], 64, 1, 16), first_value=1)
    pair.here.fabric.seal(transfer)
    with pytest.raises(FabricError, match="no more batches"):
        pair.here.fabric.write(transfer, dense([0], [0], 64, 1, 16))
    pair.here.progress(1)
    assert pair.here.wait("TransferDone").posted_atoms == 1


def test_an_empty_transfer_is_done_when_sealed(pair: Any) -> None:
    here, _ = join(pair.here, pair.there)
    transfer = pair.here.fabric.open_transfer(here, 5, 1)
    pair.here.fabric.seal(transfer)
    done = pair.here.wait("TransferDone", transfer=transfer)
    assert (done.posted_atoms, done.cancelled, done.failed) == (0, False, False)


def test_cancel_drops_what_is_armed(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    pair.there.call("expect", there, 5, 1, 12)
    transfer = pair.here.fabric.open_transfer(here, 5, 1)
    pair.here.arm(transfer, dense([0, 2], [0, 2], 64, 6, 16), first_value=10)
    pair.here.progress(11)
    pair.there.wait_count(5, 1, 4)
    pair.here.fabric.cancel(transfer)
    done = pair.here.wait("TransferDone", transfer=transfer)
    pair.here.progress(100)
    assert (done.posted_atoms, done.failed_atoms, done.cancelled, done.failed) == (
        4,
        0,
        True,
        False,
    )
    with pytest.raises(FabricError, match="no more batches"):
        pair.here.fabric.write(transfer, dense([0], [0], 64, 1, 16))
    pair.there.call("retarget", 5, 1, done.posted_atoms)
    assert pair.there.wait("Arrived").atoms == 4
    # The link still works, and the word that has passed everything posts nothing of the old batch.
    pair.there.call("expect", there, 6, 1, 1)
    transfer = pair.here.fabric.open_transfer(here, 6, 1)
    pair.here.fabric.write(transfer, dense([0], [0], 64, 1, 16))
    pair.there.wait("Arrived", slot=6)
    assert pair.there.call("count", 5, 1) == 4


def test_cancel_in_the_middle_says_exactly_what_was_posted(pair: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    here, there = join(pair.here, pair.there, window=16)
    pages = list(range(0, 8000, 2))
    for slot in range(1, 21):
        total = len(pages) * 2
        pair.there.call("expect", there, slot, 1, total)
        transfer = pair.here.fabric.open_transfer(here, slot, 1)
        pair.here.fabric.write(transfer, dense(pages, pages, 64, 1, 8192))
        pair.here.progress(0)
        pair.here.arm(transfer, dense(pages, pages, 64, 1, 8192), first_value=1)
        pair.here.progress(1)
        pair.there.wait_count(slot, 1, int(rng.integers(0, total)))
        pair.here.fabric.cancel(transfer)
        done = pair.here.wait("TransferDone", transfer=transfer)
        pair.there.call("retarget", slot, 1, done.posted_atoms)
        assert pair.there.wait("Arrived", slot=slot).atoms == done.posted_atoms
        assert pair.there.call("release", slot, 1) == done.posted_atoms


def test_fence_of_a_link_that_was_never_connected(pair: Any) -> None:
    link, _ = pair.here.open_link()
    pair.here.fabric.fence(link)
    pair.here.wait("Fenced", link=link)
    pair.here.fabric.fence(link)
    with pytest.raises(FabricError, match="never opened"):
        pair.here.fabric.fence(link + 100)
    with pytest.raises(FabricError, match="not open"):
        pair.here.fabric.descriptor(link)
    other, _ = pair.here.open_link()
    pair.here.fabric.fence(other)
    pair.here.wait("Fenced", link=other)
    assert not pair.here.pending()


def test_fence_ends_open_transfers_first(pair: Any) -> None:
    here, _ = join(pair.here, pair.there)
    idle = pair.here.fabric.open_transfer(here, 5, 1)
    armed = pair.here.fabric.open_transfer(here, 6, 1)
    pair.here.arm(armed, dense([0], [0], 64, 1, 16), first_value=1)
    pair.here.fabric.fence(here)
    pair.here.wait("Fenced", link=here)
    for transfer in (idle, armed):
        done = pair.here.wait("TransferDone", transfer=transfer, timeout_s=0)
        assert (done.code, done.posted_atoms) == (errno.ECANCELED, 0)
    assert not pair.here.pending()
    with pytest.raises(FabricError, match="not open"):
        pair.here.fabric.open_transfer(here, 7, 1)


@pytest.mark.parametrize("page_bytes", [64 * MIB, 64 * 1024])
def test_no_byte_lands_after_a_fence_in_the_middle(
    make_pair: Callable[..., Any], page_bytes: int
) -> None:
    total = 64 * MIB
    pair = make_pair(total)
    here, there = join(pair.here, pair.there)
    pair.here.memory[:] = 7
    pages = list(range(total // page_bytes))
    pair.there.call("expect", there, 5, 1, len(pages))
    transfer = pair.here.fabric.open_transfer(here, 5, 1)
    pair.here.fabric.write(transfer, dense(pages, pages, page_bytes, 1, len(pages)))
    pair.here.fabric.seal(transfer)
    pair.there.wait_set(total // 4)
    pair.there.call("fence", there)
    pair.there.wait("Fenced")
    pair.there.zero()
    # The writer hears of it, or misses the beats; until then it goes on.
    pair.here.wait("LinkDown", link=here)
    pair.here.fabric.fence(here)
    pair.here.wait("TransferDone", transfer=transfer)
    pair.here.wait("Fenced")
    assert pair.there.num_set() == 0
    assert_serves(pair.here, pair.there)


def test_a_killed_peer_is_lost_within_its_beats_and_another_serves(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    pair.there.call("expect", there, 5, 1, 1 << 30)
    pages = list(range(0, 4000, 2))
    transfer = pair.here.fabric.open_transfer(here, 5, 1)
    pair.here.arm(transfer, dense(pages, pages, 64, 1, 8192), first_value=1)
    pair.there.kill()
    killed = pair.now_ns()
    pair.here.progress(1)
    down = pair.here.wait("LinkDown", link=here)
    assert pair.now_ns() - killed < 2_500_000_000
    assert down.code
    assert down.reason
    pair.here.fabric.fence(here)
    pair.here.wait("Fenced", link=here)
    assert pair.here.wait("TransferDone", transfer=transfer, timeout_s=0).failed
    assert not pair.here.pending()
    assert_serves(pair.here, pair.another())


def test_a_killed_writer_is_lost_within_its_beats(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    pair.here.fabric.expect(here, 5, 1, 100)
    transfer = pair.there.call("open_transfer", there, 5, 1)
    pair.there.call("write", transfer, dense([0, 2], [0, 2], 64, 1, 16))
    pair.here.wait_count(5, 1, 2)
    pair.there.kill()
    killed = pair.now_ns()
    pair.here.wait("LinkDown", link=here)
    assert pair.now_ns() - killed < 2_500_000_000
    pair.here.fabric.fence(here)
    pair.here.wait("Fenced", link=here)
    assert pair.here.fabric.release(5, 1) == 2


def test_a_short_stop_loses_nothing(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    pair.there.call("expect", there, 5, 1, 2000)
    pair.there.stop()
    pages = list(range(0, 4000, 2))
    transfer = pair.here.fabric.open_transfer(here, 5, 1)
    pair.here.fabric.write(transfer, dense(pages, pages, 64, 1, 8192))
    beats = pair.here.statistics().beats_sent
    pair.here.wait_statistic("beats_sent", beats + 3)
    pair.there.resume()
    pair.there.wait("Arrived")
    assert not pair.here.pending()


def test_a_stopped_peer_is_lost_and_over_shm_our_pages_stay_held(provider: str, pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    pair.there.stop()
    stopped = pair.now_ns()
    transfer = pair.here.fabric.open_transfer(here, 5, 1)
    pair.here.fabric.write(transfer, dense([0, 2, 4, 6, 8], [0, 2, 4, 6, 8], 64 * 1024, 1, 16))
    pair.here.wait("LinkDown", link=here)
    assert pair.now_ns() - stopped < 2_500_000_000
    pair.here.fabric.fence(here)
    if provider == "shm":
        done = pair.here.wait("TransferDone", transfer=transfer)
        assert (done.code, done.posted_atoms, done.failed_atoms) == (errno.ECANCELED, 5, 5)
        with pytest.raises(FabricError, match="still used"):
            pair.here.fabric.unregister(pair.here.region)
        assert not pair.here.pending()
    else:
        pair.here.wait("Fenced")
    pair.there.resume()
    pair.there.wait("LinkDown", link=there)
    pair.there.call("fence", there)
    pair.there.wait("Fenced")
    if provider == "shm":
        pair.here.wait("Fenced", link=here)
    pair.here.fabric.unregister(pair.here.region)


def test_a_stopped_peer_that_dies_frees_our_pages(pair: Any) -> None:
    here, _ = join(pair.here, pair.there)
    pair.there.stop()
    transfer = pair.here.fabric.open_transfer(here, 5, 1)
    pair.here.fabric.write(transfer, dense([0, 2, 4, 6, 8], [0, 2, 4, 6, 8], 64 * 1024, 1, 16))
    pair.here.wait("LinkDown", link=here)
    pair.here.fabric.fence(here)
    pair.there.kill()
    pair.here.wait("Fenced", link=here)


def test_a_process_that_was_stopped_does_not_blame_its_peers(pair: Any) -> None:
    patient = pair.another(beat_timeout_s=20)
    stopped, _ = join(pair.there, patient)
    pair.there.stop()
    beats = patient.statistics().beats_sent
    patient.wait_statistic("beats_sent", beats + 12)  # three seconds
    pair.there.resume()
    beats = pair.there.statistics().beats_sent
    pair.there.wait_statistic("beats_sent", beats + 4)
    assert not pair.there.pending()
    assert stopped


def test_close_while_writes_are_on_their_way(make_pair: Callable[..., Any]) -> None:
    pair = make_pair(64 * MIB)
    here, _ = join(pair.here, pair.there)
    transfer = pair.here.fabric.open_transfer(here, 5, 1)
    pages = list(range(1024))
    pair.here.fabric.write(transfer, dense(pages, pages[::-1], 64 * 1024, 1, 1024))
    pair.here.close()
    pair.there.wait("LinkDown")


def test_a_closed_fabric_refuses_everything_and_closes_twice(pair: Any) -> None:
    pair.here.close()
    pair.here.close()
    for call in (pair.here.fabric.events, pair.here.fabric.fileno, pair.here.fabric.statistics):
        with pytest.raises(FabricError, match="closed"):
            call()
