"""Requests leave nothing behind."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any

import pytest

from pdx.fabric import Arrived
from pdx.fabric.interface import MAX_GENERATION
from tests.fabric.faults.echo import begin_request, request_pages, start_echo
from tests.fabric.faults.process import resident_bytes
from tests.fabric.pairs import Pair
from tests.fabric.sides import join

NUM_SLOTS = 64
BATCH = request_pages(8, 512)
#: The default's memory is touched for the first time until some 50,000 requests have gone by.
SMALL_QUEUE = {"queue_entries": 2048}


class Requests:
    """Paged requests that are answered, NUM_SLOTS of them at a time. Generations wrap."""

    def __init__(self, pair: Pair, link: int) -> None:
        self._fabric: Any = pair.here.fabric
        self._link = link
        self._idle = [(slot, 0) for slot in range(1, NUM_SLOTS + 1)]

    def serve(self, count: int) -> None:
        """So many, from the first to the last's answer."""
        left, running = count, 0
        while left or running:
            while left and self._idle:
                slot, generation = self._idle.pop()
                self._fabric.expect(self._link, slot, generation, BATCH.num_atoms)
                begin_request(self._fabric, self._link, slot, generation, BATCH)
                left, running = left - 1, running + 1
            select.select([self._fabric], [], [], 10)
            for event in self._fabric.events():
                if isinstance(event, Arrived):
                    self._fabric.release(event.slot, event.generation)
                    following = (event.generation + 1) & MAX_GENERATION
                    self._idle.append((event.slot, following))
                    running -= 1


def _assert_no_growth(pair: Pair, first: int, total: int, limit_bytes: int) -> None:
    """Both sides' memory after ``total`` requests is what it was after the ``first``."""
    here, there = join(pair.here, pair.there)
    pair.there.run(start_echo, there, NUM_SLOTS, total, BATCH)
    requests = Requests(pair, here)
    requests.serve(first)
    before = [side.run(resident_bytes) for side in (pair.here, pair.there)]
    requests.serve(total - first)
    grown = [
        side.run(resident_bytes) - size
        for side, size in zip((pair.here, pair.there), before, strict=True)
    ]
    print(f"grown by {grown} bytes in {total - first} requests")
    assert max(grown) < limit_bytes
    assert pair.here.statistics().stale_imms == 0


def test_requests_do_not_make_memory_grow(make_pair: Callable[..., Pair]) -> None:
    # 64 bytes a request would show.
    _assert_no_growth(make_pair(**SMALL_QUEUE), first=4_000, total=12_000, limit_bytes=512 << 10)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_requests_do_not_make_memory_grow(make_pair: Callable[..., Pair]) -> None:
    # One byte and a half a request would show.
    _assert_no_growth(
        make_pair(**SMALL_QUEUE), first=10_000, total=1_000_000, limit_bytes=1536 << 10
    )
