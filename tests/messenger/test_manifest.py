"""What a node says of its KV memory: every split that can be, and no other."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from pdx.errors import ProtocolError
from pdx.messenger.manifest import Manifest

ONE_RANK = Manifest(
    weights_id="w",
    text_id="t",
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    dtype="float32",
    page_size=16,
    tp_size=1,
    kv_layout="hnd",
    num_pages=4,
)


def test_ranks_divide_the_heads_or_are_a_multiple_of_them() -> None:
    for num_heads, tp_size in itertools.product(range(1, 17), repeat=2):
        manifest = msgspec.structs.replace(ONE_RANK, num_kv_heads=num_heads, tp_size=tp_size)
        if num_heads % tp_size and tp_size % num_heads:
            with pytest.raises(ProtocolError, match="cannot be"):
                manifest.layout()
            continue
        layout = manifest.layout()
        held = [head for rank in range(tp_size) for head in layout.heads(rank)]
        assert sorted(held) == sorted(list(range(num_heads)) * layout.num_replicas)
        assert layout.rank.num_kv_heads * tp_size == len(held)


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 0},
        {"num_pages": -1},
        {"dtype": "int7"},
        {"kv_alignment": 0},
        {"num_parts": 0},
    ],
)
def test_a_memory_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="cannot be"):
        msgspec.structs.replace(ONE_RANK, **change).layout()


def test_records_of_one_part_are_half_of_keys_and_values() -> None:
    record = msgspec.structs.replace(ONE_RANK, num_parts=1).layout()
    assert 2 * record.rank.page_bytes == ONE_RANK.layout().rank.page_bytes
