"""Regions of several parts: one row of offsets, parts of memory anywhere, keys for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pdx.errors import FabricError
from pdx.fabric import PageBatch
from tests.fabric.batches import apply, dense, random_batch
from tests.fabric.sides import assert_serves, join

MIB = 1 << 20
PAGE = 4096
#: Offset in a side's memory, and bytes.
Span = tuple[int, int]


def spans_of(rng: np.random.Generator, num_bytes: int, num_parts: int) -> list[Span]:
    """Parts of unlike sizes, in no order of addresses, with a gap after each."""
    room = num_bytes // num_parts
    spans = [(i * room, room - int(rng.integers(64, room // 4))) for i in range(num_parts)]
    return [spans[i] for i in rng.permutation(num_parts)]


def starts_of(spans: list[Span]) -> list[int]:
    """The offset in the region that each part begins at."""
    return [0, *np.cumsum([length for _, length in spans]).tolist()[:-1]]


def region_of(memory: NDArray[np.uint8], spans: list[Span]) -> NDArray[np.uint8]:
    """What lies at the region's offsets."""
    return np.concatenate([memory[offset : offset + length] for offset, length in spans])


def moved(batch: PageBatch, src: int, dst: int) -> PageBatch:
    return dataclasses.replace(
        batch, src_offset=batch.src_offset + src, dst_offset=batch.dst_offset + dst
    )


def page_at(src: int, dst: int, num_pages: int = 1) -> PageBatch:
    """Neighbouring pages from one offset to another."""
    pages = list(range(num_pages))
    return moved(dense(pages, pages, PAGE, 1, 0), src, dst)


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (2, 2), (5, 5), (1, 5), (5, 2)])
def test_random_pages_land_byte_for_byte_in_every_part(
    make_pair: Callable[..., Any], seed: int, ours: int, theirs: int
) -> None:
    rng = np.random.default_rng(seed)
    pair = make_pair(MIB)
    src_spans, dst_spans = spans_of(rng, MIB, ours), spans_of(rng, MIB, theirs)
    pair.here.register_spans(src_spans)
    pair.there.register_spans(dst_spans)
    here, there = join(pair.here, pair.there)
    pair.here.fill(seed)
    source = region_of(pair.here.memory, src_spans)
    for slot in range(1, 7):
        pair.there.zero()
        target = np.zeros(sum(length for _, length in dst_spans), np.uint8)
        batches = []
        for dst_start, (_, dst_bytes) in zip(starts_of(dst_spans), dst_spans, strict=True):
            i = int(rng.integers(ours))
            batch = random_batch(rng, min(src_spans[i][1], dst_bytes))
            batches.append(moved(batch, starts_of(src_spans)[i], dst_start))
            apply(batches[-1], source, target)
        pair.there.call("expect", there, slot, 3, sum(b.num_atoms for b in batches))
        transfer = pair.here.fabric.open_transfer(here, slot, 3)
        for batch in batches:
            pair.here.fabric.write(transfer, batch)
        pair.here.fabric.seal(transfer)
        pair.there.wait("Arrived", slot=slot)
        expected = np.zeros(MIB, np.uint8)
        for start, (offset, length) in zip(starts_of(dst_spans), dst_spans, strict=True):
            expected[offset : offset + length] = target[start : start + length]
        assert pair.there.read() == expected.tobytes(), "nor does anything land in the gaps"
        done = pair.here.wait("TransferDone", transfer=transfer)
        assert (done.posted_atoms, done.failed) == (sum(b.num_atoms for b in batches), False)


def test_pages_of_any_part_may_be_counted_from_the_regions_start(
    make_pair: Callable[..., Any],
) -> None:
    pair = make_pair(40 * PAGE)
    spans = [(30 * PAGE, 8 * PAGE), (PAGE, 8 * PAGE), (12 * PAGE, 8 * PAGE)]
    for side in (pair.here, pair.there):
        side.register_spans(spans)
    here, there = join(pair.here, pair.there)
    pair.here.fill(1)
    pair.there.call("expect", there, 1, 1, 4)
    transfer = pair.here.fabric.open_transfer(here, 1, 1)
    pair.here.fabric.write(transfer, dense([8, 9, 15], [16, 17, 23], PAGE, 1, 0))
    pair.here.arm(transfer, dense([23], [0], PAGE, 1, 0), first_value=1)
    pair.here.progress(1)
    pair.there.wait("Arrived")
    for source, target in ((1, 12), (2, 13), (8, 19), (19, 30)):
        assert pair.there.read(target * PAGE, PAGE) == pair.here.read(source * PAGE, PAGE)
    assert pair.there.num_set() == 4 * PAGE


def test_a_batch_that_crosses_a_parts_end_is_refused(make_pair: Callable[..., Any]) -> None:
    """Where the parts are neighbours in memory, too: they may be two GPUs'."""
    pair = make_pair(16 * PAGE)
    lengths = [3 * PAGE, PAGE, 4 * PAGE]
    spans = [(0, lengths[0]), (lengths[0], lengths[1]), (8 * PAGE, lengths[2])]
    for side in (pair.here, pair.there):
        side.register_spans(spans)
    here, there = join(pair.here, pair.there)
    pair.here.fill(2)
    ends = np.cumsum(lengths).tolist()
    posted = 0
    pair.there.call("expect", there, 1, 1, 5)
    transfer = pair.here.fabric.open_transfer(here, 1, 1)
    for end in ends:
        for crossing in (page_at(end - PAGE + 1, 0), page_at(end - 1, 0), page_at(0, end - 1)):
            with pytest.raises(FabricError, match="does not lie in one of its parts"):
                pair.here.fabric.write(transfer, crossing)
        for source, target in ((end - PAGE, 0), (0, end - PAGE)):
            with pytest.raises(FabricError, match="which end at bytes 12288 16384 32768"):
                pair.here.fabric.write(transfer, page_at(source, target, num_pages=6))
        pair.here.fabric.write(transfer, page_at(end - PAGE, end - PAGE))
        posted += 1
    for start in ends[:-1]:
        pair.here.fabric.write(transfer, page_at(start, start))
        posted += 1
    assert pair.there.wait("Arrived").atoms == posted
    assert pair.there.num_set() == 4 * PAGE, "the middle part's only page was written twice"
    assert pair.there.read(2 * PAGE, 2 * PAGE) == pair.here.read(2 * PAGE, 2 * PAGE)
    assert pair.there.read(8 * PAGE, PAGE) == pair.here.read(8 * PAGE, PAGE)
    assert pair.there.read(11 * PAGE, PAGE) == pair.here.read(11 * PAGE, PAGE)


def test_parts_and_offsets_beyond_four_gib(make_pair: Callable[..., Any]) -> None:
    """Memory that nobody touches costs nothing."""
    page, far = 64 * 1024, 1 << 32
    pair = make_pair(far + 64 * page)
    first = far + 32 * page
    for side in (pair.here, pair.there):
        side.register_spans([(0, first), (first, 32 * page)])
    here, there = join(pair.here, pair.there)
    pair.here.memory[far:] = np.arange(64 * page, dtype=np.uint32) % 251
    pair.there.call("expect", there, 1, 1, 4)
    transfer = pair.here.fabric.open_transfer(here, 1, 1)
    within = dense([65536, 65567], [65537, 65540], page, 1, 0)
    pair.here.fabric.write(transfer, within)
    pair.here.fabric.write(transfer, moved(dense([0, 31], [30, 1], page, 1, 0), first, first))
    pair.there.wait("Arrived")
    for source, target in ((0, 1), (31, 4), (32, 62), (63, 33)):
        landed = pair.there.read(far + target * page, page)
        assert landed == pair.here.read(far + source * page, page)
    with pytest.raises(FabricError, match="does not lie in one"):
        pair.here.fabric.write(transfer, dense([65567, 65568], [0, 1], page, 1, 0))


def test_no_byte_lands_in_any_part_after_a_fence(make_pair: Callable[..., Any]) -> None:
    total, num_parts, page = 40 * MIB, 5, 64 * 1024
    pair = make_pair(total)
    room = total // num_parts
    spans = [(i * room, room) for i in reversed(range(num_parts))]
    for side in (pair.here, pair.there):
        side.register_spans(spans)
    here, there = join(pair.here, pair.there)
    pair.here.memory[:] = 7
    pages = list(range(room // page))
    pair.there.call("expect", there, 5, 1, num_parts * len(pages))
    transfer = pair.here.fabric.open_transfer(here, 5, 1)
    for start in starts_of(spans):
        pair.here.fabric.write(transfer, moved(dense(pages, pages, page, 1, 0), start, start))
    pair.here.fabric.seal(transfer)
    pair.there.wait_count(5, 1, len(pages))
    pair.there.call("fence", there)
    pair.there.wait("Fenced")
    pair.there.zero()
    # The writer hears of it, or misses the beats; until then it goes on.
    pair.here.wait("LinkDown", link=here)
    pair.here.fabric.fence(here)
    pair.here.wait("TransferDone", transfer=transfer)
    pair.here.wait("Fenced")
    assert pair.there.num_set() == 0
    for side in (pair.here, pair.there):
        side.register_spans([(0, total)])
    assert_serves(pair.here, pair.there)


def test_a_region_has_between_one_and_64_parts(make_pair: Callable[..., Any]) -> None:
    pair = make_pair(65 * PAGE)
    for num_parts in (0, 65):
        with pytest.raises(FabricError, match=f"a region of {num_parts} parts"):
            pair.here.register_spans([(i * PAGE, PAGE) for i in range(num_parts)])
    with pytest.raises(FabricError, match="at least one byte"):
        pair.here.register_spans([(0, PAGE), (PAGE, 0)])
    for side in (pair.here, pair.there):
        side.register_spans([(i * PAGE, PAGE) for i in range(64)])
    here, there = join(pair.here, pair.there)
    pair.here.fill(3)
    pair.there.call("expect", there, 1, 1, 1)
    transfer = pair.here.fabric.open_transfer(here, 1, 1)
    pair.here.fabric.write(transfer, page_at(63 * PAGE, 62 * PAGE))
    pair.there.wait("Arrived")
    assert pair.there.read(62 * PAGE, PAGE) == pair.here.read(63 * PAGE, PAGE)
