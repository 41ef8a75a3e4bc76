"""The fence against one write that is far larger than any buffer on its way."""

from __future__ import annotations

from collections.abc import Callable

from tests.fabric.batches import dense
from tests.fabric.pairs import Pair
from tests.fabric.sides import assert_serves, join

MIB = 1 << 20
TOTAL = 256 * MIB


def test_no_byte_of_one_256_mib_write_lands_after_a_fence_at_its_quarter(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair(TOTAL)
    here, there = join(pair.here, pair.there)
    pair.here.memory[:] = 7
    pair.there.call("expect", there, 5, 1, 1)
    transfer = pair.here.fabric.open_transfer(here, 5, 1)
    pair.here.fabric.write(transfer, dense([0], [0], TOTAL, 1, 1))
    pair.there.wait_set(TOTAL // 4)
    pair.there.call("fence", there)
    pair.there.wait("Fenced", link=there)
    pair.there.zero()
    # The writer goes on, into a connection or a queue that nobody reads.
    pair.here.fabric.fence(here)
    pair.here.wait("TransferDone", transfer=transfer)
    pair.here.wait("Fenced", link=here)
    assert_serves(pair.here, pair.there)
    assert pair.there.num_set() == 4096
