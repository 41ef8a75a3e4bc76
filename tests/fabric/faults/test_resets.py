"""A connection that is reset while both processes live: what a writer was told is then worth
nothing, what a reader counts still is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pdx.fabric import FabricOptions
from tests.fabric.batches import dense
from tests.fabric.faults.process import reset_connections
from tests.fabric.pairs import Pair
from tests.fabric.sides import assert_serves, join

MIB = 1 << 20
PAGE_BYTES = 64 << 10
NUM_PAGES = 64 * MIB // PAGE_BYTES


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair("tcp", 64 * MIB, FabricOptions())
    yield made
    made.close()


@pytest.mark.parametrize("broken_by", ["writer", "reader"])
def test_after_a_reset_in_mid_write_the_count_is_true_and_the_fence_holds(
    pair: Pair, broken_by: str
) -> None:
    here, there = join(pair.here, pair.there)
    pair.here.fill(1)
    pages = list(range(NUM_PAGES))
    pair.there.call("expect", there, 5, 1, NUM_PAGES)
    transfer = pair.here.fabric.open_transfer(here, 5, 1)
    pair.here.fabric.write(transfer, dense(pages, pages, PAGE_BYTES, 1, NUM_PAGES))
    pair.here.fabric.seal(transfer)
    pair.there.wait_count(5, 1, 100)
    side = pair.here if broken_by == "writer" else pair.there
    assert side.run(reset_connections) > 0
    done = pair.here.wait("TransferDone", transfer=transfer)
    if done.failed:  # as a rule; the reset may also have come too late
        pair.here.wait("LinkDown", link=here, code=done.code)
    # Before the fence: what is counted has landed.
    count = pair.there.call("count", 5, 1)
    landed = np.frombuffer(pair.there.read(), np.uint8) == pair.here.memory
    assert landed.reshape(NUM_PAGES, -1).all(axis=1).sum() >= count
    pair.there.call("fence", there)
    pair.there.wait("Fenced", link=there)
    pair.there.zero()
    pair.here.fabric.fence(here)
    pair.here.wait("Fenced", link=here)
    assert_serves(pair.here, pair.there)
    assert pair.there.num_set() == 4096


def test_a_link_that_is_reset_while_idle_carries_on_or_fails_the_next_transfer(pair: Pair) -> None:
    here, there = join(pair.here, pair.there)
    pair.here.fill(1)
    assert pair.here.run(reset_connections) > 0
    pair.there.call("expect", there, 5, 1, 1)
    transfer = pair.here.fabric.open_transfer(here, 5, 1)
    pair.here.fabric.write(transfer, dense([0], [0], PAGE_BYTES, 1, 1))
    pair.here.fabric.seal(transfer)
    done = pair.here.wait("TransferDone", transfer=transfer)
    if done.failed:  # libfabric mostly connects again
        pair.here.wait("LinkDown", link=here, code=done.code)
    else:
        pair.there.wait("Arrived", slot=5)
        assert pair.there.read(0, PAGE_BYTES) == pair.here.read(0, PAGE_BYTES)
    assert_serves(pair.here, pair.there)
