"""Writes land where the batch says, byte for byte, and the receiver counts atoms, not writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pdx.errors import FabricError
from pdx.fabric import PageBatch
from tests.fabric.batches import apply, dense, random_batch
from tests.fabric.sides import join


def test_random_pages_land_byte_for_byte(pair: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    here, there = join(pair.here, pair.there)
    pair.here.fill(seed)
    for slot in range(1, 13):
        pair.there.zero()
        expected = np.zeros(len(pair.here.memory), np.uint8)
        batches = [random_batch(rng, len(expected)) for _ in range(2)]
        pair.there.call("expect", there, slot, 3, sum(b.num_atoms for b in batches))
        transfer = pair.here.fabric.open_transfer(here, slot, 3)
        for batch in batches:
            pair.here.fabric.write(transfer, batch)
            pair.there.wait_count(slot, 3, batch.num_atoms)
            apply(batch, pair.here.memory, expected)
        pair.here.fabric.seal(transfer)
        arrived = pair.there.wait("Arrived", slot=slot)
        assert arrived.atoms == sum(b.num_atoms for b in batches)
        assert pair.there.read() == expected.tobytes()
        done = pair.here.wait("TransferDone", transfer=transfer)
        assert (done.posted_atoms, done.failed_atoms, done.failed) == (arrived.atoms, 0, False)
        assert pair.there.call("release", slot, 3) == arrived.atoms
    assert pair.there.statistics().stale_imms == 0


def test_batches_in_one_transfer_add_up_in_any_order(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    pair.here.fill(1)
    pair.there.call("expect", there, 9, 0, 5 * 2 * 8)
    transfer = pair.here.fabric.open_transfer(here, 9, 0)
    for start in (24, 0, 16, 8, 32):
        pages = list(range(start, start + 8))
        pair.here.fabric.write(transfer, dense(pages, pages, 1024, 2, 64))
    pair.here.fabric.seal(transfer)
    pair.there.wait("Arrived", slot=9)
    assert pair.there.read(0, 40 * 1024) == pair.here.read(0, 40 * 1024)
    assert pair.there.read(64 * 1024, 40 * 1024) == pair.here.read(64 * 1024, 40 * 1024)


@pytest.mark.parametrize(
    ("num_pages", "writes"),
    [(1, 1), (4, 1), (256, 1), (257, 2), (512, 2), (600, 3)],
)
def test_neighbours_are_merged_up_to_256_atoms(pair: Any, num_pages: int, writes: int) -> None:
    here, there = join(pair.here, pair.there)
    pair.here.fill(2)
    pages = list(range(num_pages))
    pair.there.call("expect", there, 1, 1, num_pages)
    transfer = pair.here.fabric.open_transfer(here, 1, 1)
    pair.here.fabric.write(transfer, dense(pages, pages, 512, 1, 1024))
    pair.here.fabric.seal(transfer)
    assert pair.there.wait("Arrived").atoms == num_pages
    assert pair.here.wait("TransferDone").posted_atoms == num_pages
    assert pair.here.statistics().writes_posted == writes
    assert pair.there.read(0, num_pages * 512) == pair.here.read(0, num_pages * 512)


@pytest.mark.parametrize(("page_kib", "over_shm"), [(4, 1), (8, 1), (16, 4), (32, 4), (64, 4)])
def test_scattered_pages_are_gathered_to_writes_of_a_quick_size(
    make_pair: Callable[..., Any], provider: str, page_kib: int, over_shm: int
) -> None:
    pair = make_pair(24 * page_kib << 10)
    here, there = join(pair.here, pair.there)
    pair.here.fill(3)
    pages = list(range(0, 24, 2))
    pair.there.call("expect", there, 1, 1, 12)
    transfer = pair.here.fabric.open_transfer(here, 1, 1)
    pair.here.fabric.write(transfer, dense(pages, pages[::-1], page_kib << 10, 1, 24))
    pair.here.fabric.seal(transfer)
    pair.there.wait("Arrived")
    pair.here.wait("TransferDone")  # the peer may have counted a write before it is one of ours
    pages_a_write = over_shm if provider == "shm" else 4
    assert pair.here.statistics().writes_posted == 12 // pages_a_write


def test_large_pages_are_not_gathered(make_pair: Callable[..., Any]) -> None:
    pair = make_pair(16 << 20)
    here, there = join(pair.here, pair.there)
    pair.here.fill(4)
    pages = [0, 2, 4, 6]
    pair.there.call("expect", there, 1, 1, 4)
    transfer = pair.here.fabric.open_transfer(here, 1, 1)
    pair.here.fabric.write(transfer, dense(pages, pages, 1 << 20, 1, 8))
    pair.here.fabric.seal(transfer)
    pair.there.wait("Arrived")
    pair.here.wait("TransferDone")
    assert pair.here.statistics().writes_posted == 4


def test_regions_and_offsets_beyond_four_gib(make_pair: Callable[..., Any]) -> None:
    """Memory that nobody touches costs nothing."""
    page, far = 64 * 1024, 1 << 32
    pair = make_pair(far + 64 * page)
    here, there = join(pair.here, pair.there)
    pair.here.memory[far : far + 4 * page] = np.arange(4 * page, dtype=np.uint32) % 251
    batch = PageBatch(
        src_pages=np.array([65536, 65538], np.uint32),
        dst_pages=np.array([65569, 65537], np.uint32),
        page_bytes=page,
        num_layers=2,
        src_layer_stride=page,
        dst_layer_stride=20 * page,
    )
    pair.there.call("expect", there, 1, 1, batch.num_atoms)
    transfer = pair.here.fabric.open_transfer(here, 1, 1)
    pair.here.fabric.write(transfer, batch)
    pair.there.wait("Arrived")
    for source, target in ((0, 33), (2, 1), (1, 53), (3, 21)):
        assert pair.there.read(far + target * page, page) == pair.here.read(
            far + source * page, page
        )


def test_a_batch_without_pages_or_layers_posts_nothing(pair: Any) -> None:
    here, there = join(pair.here, pair.there)
    transfer = pair.here.fabric.open_transfer(here, 1, 1)
    pair.here.fabric.write(transfer, dense([], [], 512, 2, 8))
    pair.here.fabric.write(transfer, dense([0], [0], 512, 0, 8))
    pair.here.arm(transfer, dense([], [], 512, 2, 8), first_value=1)
    pair.here.fabric.seal(transfer)
    pair.here.progress(2)
    done = pair.here.wait("TransferDone")
    assert (done.posted_atoms, done.failed, done.first_post_ns) == (0, False, None)
    assert done.last_progress_ns is not None
    assert pair.there.statistics().imms_reaped == 0
    assert there


def test_more_writes_than_the_window_all_arrive(make_pair: Callable[..., Any]) -> None:
    pair = make_pair()
    here, there = join(pair.here, pair.there, window=3)
    pair.here.fill(5)
    pages = list(range(0, 2000, 2))
    pair.there.call("expect", there, 1, 1, 1000)
    transfer = pair.here.fabric.open_transfer(here, 1, 1)
    pair.here.fabric.write(transfer, dense(pages, pages, 512, 1, 2048))
    pair.here.fabric.seal(transfer)
    pair.there.wait("Arrived")
    assert pair.here.wait("TransferDone").posted_atoms == 1000


def test_stale_immediates_give_their_credit_back(make_pair: Callable[..., Any]) -> None:
    pair = make_pair()
    here, there = join(pair.here, pair.there, window=4)
    pages = list(range(0, 200, 2))
    for slot in (1, 2):
        if slot == 1:
            pair.there.call("expect", there, slot, 1, 100)
            pair.there.call("release", slot, 1)
        else:
            pair.there.call("expect", there, slot, 1, 100)
        transfer = pair.here.fabric.open_transfer(here, slot, 1)
        pair.here.fabric.write(transfer, dense(pages, pages, 512, 1, 2048))
        pair.here.fabric.seal(transfer)
        pair.here.wait("TransferDone", transfer=transfer)
    pair.there.wait("Arrived", slot=2)
    assert pair.there.statistics().stale_imms == 25


def test_immediates_of_a_pair_that_nobody_armed_give_their_credit_back(
    make_pair: Callable[..., Any],
) -> None:
    """They name no link; the writer's beats say how many are its own."""
    pair = make_pair(beat_interval_s=0.02)
    here, there = join(pair.here, pair.there, window=4)
    join(pair.another(beat_interval_s=0.02), pair.there, window=4)
    pages = list(range(0, 200, 2))
    for slot in (1, 2):
        transfer = pair.here.fabric.open_transfer(here, slot, 1)
        pair.here.fabric.write(transfer, dense(pages, pages, 512, 1, 2048))
        pair.here.fabric.seal(transfer)
        pair.here.wait("TransferDone", transfer=transfer)
        if slot == 1:
            pair.there.wait_statistic("stale_imms", 25)
            pair.there.call("expect", there, 2, 1, 100)
    pair.there.wait("Arrived", slot=2)
    assert pair.there.statistics().stale_imms == 25


def test_two_links_of_one_fabric_serve_two_peers(pair: Any) -> None:
    third = pair.another()
    sides = [pair.there, third]
    links = [join(pair.here, side) for side in sides]
    pair.here.fill(6)
    transfers = []
    for (here, there), side in zip(links, sides, strict=True):
        side.call("expect", there, 4, 4, 64)
        transfers.append(pair.here.fabric.open_transfer(here, 4, 4))
    for index, transfer in enumerate(transfers):
        pages = list(range(index * 64, index * 64 + 64))
        pair.here.fabric.write(transfer, dense(pages, pages, 1024, 1, 128))
    for index, side in enumerate(sides):
        side.wait("Arrived")
        assert side.read(index << 16, 1 << 16) == pair.here.read(index << 16, 1 << 16)
        assert side.num_set() == 1 << 16


def _bad(**changes: Any) -> PageBatch:
    fields: dict[str, Any] = {
        "src_pages": np.array([0, 1023], np.uint32),
        "dst_pages": np.array([0, 1023], np.uint32),
        "page_bytes": 512,
        "num_layers": 2,
        "src_layer_stride": 1024 * 512,
        "dst_layer_stride": 1024 * 512,
    }
    return PageBatch(**(fields | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"dst_offset": 1},
        {"src_offset": 1},
        {"dst_pages": np.array([0, 1024], np.uint32)},
        {"src_pages": np.array([0, 4294967295], np.uint32)},
        {"num_layers": 3},
        {"page_bytes": 513, "src_page_stride": 512, "dst_page_stride": 512},
        {"dst_layer_stride": (1 << 64) - 1},
        {"dst_page_stride": (1 << 64) - 512},
        {"src_offset": 1 << 64},
        {"dst_offset": -1},
        {"page_bytes": 0},
        {"num_layers": -1},
        {"num_layers": 1 << 32},
        {"page_bytes": 1 << 64},
        {"dst_pages": np.array([0], np.uint32)},
        {"dst_pages": np.array([0, 1], np.int64)},
        {"dst_pages": np.array([[0, 1]], np.uint32)},
    ],
)
def test_a_batch_that_leaves_a_region_or_makes_no_sense_is_refused(
    pair: Any, changes: dict[str, Any]
) -> None:
    here, _ = join(pair.here, pair.there)
    transfer = pair.here.fabric.open_transfer(here, 1, 1)
    pair.here.fabric.write(transfer, _bad())
    with pytest.raises(FabricError):
        pair.here.fabric.write(transfer, _bad(**changes))
    pair.here.fabric.seal(transfer)
    assert pair.here.wait("TransferDone").posted_atoms == 4
