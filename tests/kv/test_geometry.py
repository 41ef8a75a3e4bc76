"""From a model to its KV memory: what is refused, by name, and how much fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdx.checkpoint.model import Family, ModelConfig
from pdx.checkpoint.rope import RopeConfig
from pdx.errors import ConfigError
from pdx.kv.geometry import check_tp_size, kv_layout, node_layout, num_pages_in

#: Eight attention heads of 16 values, two KV heads, three layers.
MODEL = ModelConfig(
    family=Family.LLAMA,
    hidden_size=128,
    intermediate_size=256,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=512,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e4, scaling=None),
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    dtype="float32",
    bos_token_id=None,
    eos_token_ids=(),
)


def test_each_rank_holds_its_heads_or_a_copy_of_one() -> None:
    assert [kv_layout(MODEL, 16, 4, "float32", tp).num_kv_heads for tp in (1, 2, 4, 8)] == [
        2,
        1,
        1,
        1,
    ]
    node = node_layout(MODEL, 16, 4, "float32", 4)
    assert (node.tp_size, node.num_kv_heads, node.num_replicas) == (4, 2, 2)
    assert node.rank == kv_layout(MODEL, 16, 4, "float32", 4)


@pytest.mark.parametrize("tp_size", [0, 3, 5, 16])
def test_ranks_that_do_not_divide_the_heads_are_refused(tp_size: int) -> None:
    with pytest.raises(ConfigError, match=f"over {tp_size} ranks") as refused:
        check_tp_size(MODEL, tp_size)
    assert refused.value.hint == "use --tp 1, 2, 4, 8"
    with pytest.raises(ConfigError):
        kv_layout(replace(MODEL, num_kv_heads=3), 16, 4, "float32", 2)


@pytest.mark.parametrize(
    ("page_size", "num_pages", "dtype", "message"),
    [
        (0, 4, "float32", "page size 0 is not positive"),
        (16, 0, "float32", "0 KV pages are too few"),
        (16, -3, "float32", "-3 KV pages are too few"),
        (16, 4, "int7", "dtype 'int7' is unknown"),
    ],
)
def test_a_memory_that_cannot_be_is_refused_by_name(
    page_size: int, num_pages: int, dtype: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_layout(MODEL, page_size, num_pages, dtype)


def test_as_many_pages_fit_as_their_bytes_say() -> None:
    layout = kv_layout(MODEL, 16, 7, "bfloat16")
    page_bytes = 3 * 2 * 2 * 16 * 16 * 2
    assert layout.total_bytes == 7 * page_bytes
    assert layout.token_bytes * 16 == page_bytes
    for num_bytes, wanted in ((page_bytes - 1, 0), (page_bytes, 1), (7 * page_bytes + 1, 7)):
        assert num_pages_in(MODEL, 16, num_bytes, "bfloat16") == wanted


def test_each_page_of_each_layer_has_bytes_of_its_own() -> None:
    layout = kv_layout(MODEL, 16, 5, "float32")
    places = [layout.page_offset_bytes(layer, page) for layer in range(3) for page in range(5)]
    assert places == [i * layout.page_bytes for i in range(15)]
    assert places[-1] + layout.page_bytes == layout.total_bytes
