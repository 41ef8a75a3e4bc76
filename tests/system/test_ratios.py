"""Every ratio of ranks, with real processes: tokens are those of one whole model, and exactly the
bytes move that the decoder lacks. ``scripts/soak --sharding`` runs the full product.

Ratio, page sizes, chunk, who has a prefix and what of it is asked: all pairs of their values occur,
by orthogonal arrays. The tiny model has 2 KV heads, so that 4 ranks hold replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.oracle.transformers_oracle import Oracle
from tests.system.sharing import HOLDERS, PAGE, PROBES, Cluster, Shape, cluster_of

pytestmark = [
    pytest.mark.timeout(300),  # 10 to 13 processes start, on a machine that may be busy
    pytest.mark.xdist_group("ratios"),  # one cluster at a time
]

TP_SIZES = (1, 2, 4)
#: The prefiller's: as the decoder's, larger, smaller.
PAGE_SIZES = (PAGE, 4 * PAGE, PAGE // 2)
#: Whole pages, an odd number of tokens, whole pages of the smallest size only.
CHUNKS = (4 * PAGE, 17, 24)


def prefiller_of(prefill_idx: int, decode_idx: int) -> Shape:
    """Of a ratio; its page size and its chunk are their sums modulo 3."""
    return Shape(
        tp_size=TP_SIZES[prefill_idx],
        page_size=PAGE_SIZES[(prefill_idx + decode_idx) % 3],
        chunk=CHUNKS[(prefill_idx + 2 * decode_idx) % 3],
    )


@pytest.fixture(scope="module", params=range(3), ids=[f"to_tp{size}" for size in TP_SIZES])
def decode_idx(request: pytest.FixtureRequest) -> int:
    """The decoder's TP size."""
    idx: int = request.param
    return idx


@pytest.fixture(scope="module")
def cluster(
    decode_idx: int,
    tiny_llama: Path,
    tiny_oracle: Oracle,
    tiny_prompt_ids: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """One decoder, and a prefiller of each TP size."""
    shapes = [prefiller_of(idx, decode_idx) for idx in range(3)]
    decode_tp, logs = TP_SIZES[decode_idx], tmp_path_factory.mktemp("ratios")
    with cluster_of(shapes, decode_tp, tiny_llama, tiny_oracle, tiny_prompt_ids, logs) as started:
        yield started


def test_tokens_and_bytes_of_every_ratio(cluster: Cluster) -> None:
    cluster.check_lengths()


@pytest.mark.parametrize("holder_idx", range(3), ids=HOLDERS)
@pytest.mark.parametrize("prefill_idx", range(3), ids=[f"tp{size}" for size in TP_SIZES])
def test_only_missing_pages_move_at_every_ratio(
    cluster: Cluster, decode_idx: int, prefill_idx: int, holder_idx: int
) -> None:
    probe = list(PROBES)[(prefill_idx + decode_idx + holder_idx) % 3]
    cluster.check_prefix(prefill_idx, HOLDERS[holder_idx], probe)
