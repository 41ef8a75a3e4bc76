"""Why a decoder with several ranks may wait for one number: the sum of its ranks' atoms is complete
exactly when each rank's own number is, whatever is lost and in whatever order the rest comes.

What this rests on: a prefiller posts each atom that both sides agreed on once (these tests), the
fabric posts a write once and delivers it once at most (its conformance suite), and a number above
the expected one ends the link.
"""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from pdx.fabric import PageBatch
from pdx.messenger.plan import atoms_by_rank
from tests.messenger.test_plan import Case, cases, send_all


def ranks_of(case: Case, batch: PageBatch) -> list[int]:
    """The destination rank of each atom, in the order in which they are posted."""
    page_stride = batch.dst_page_stride or batch.page_bytes
    layers = batch.dst_offset + np.arange(batch.num_layers) * batch.dst_layer_stride
    places = layers[:, None] + batch.dst_pages.astype(np.int64) * page_stride
    first_rank = case.dst_group * case.dst.tp_size
    ranks: list[int] = (places.ravel() // case.dst.rank_stride_bytes - first_rank).tolist()
    return ranks


@settings(max_examples=40)
@given(case=cases(), data=st.data())
def test_a_sum_is_complete_exactly_when_each_ranks_count_is(
    case: Case, data: st.DataObject
) -> None:
    """Writes carry up to 256 atoms; any of them may be lost, the others come in any order."""
    declared = atoms_by_rank(
        case.src,
        case.dst,
        case.transfer_id,
        case.first_position,
        case.num_tokens,
    )
    writes: list[list[int]] = []
    longest = data.draw(st.sampled_from([1, 3, 256]))
    for each in send_all(case):
        ranks = ranks_of(case, each.batch)
        writes += [ranks[i : i + longest] for i in range(0, len(ranks), longest)]
    dice = data.draw(st.randoms(use_true_random=False))
    dice.shuffle(writes)
    num_lost = data.draw(st.integers(0, min(2, len(writes))))
    wanted = {rank: atoms for rank, atoms in enumerate(declared) if atoms}
    counted: Counter[int] = Counter()
    for write in writes[num_lost:]:
        assert counted.total() < sum(declared), "complete before the last write is here"
        counted.update(write)
        assert all(counted[rank] <= declared[rank] for rank in counted), "no rank has a surplus"
        assert (counted.total() == sum(declared)) == (counted == wanted)
    assert (counted.total() == sum(declared)) == (num_lost == 0)
