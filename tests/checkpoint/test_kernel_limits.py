"""Sizes that no kernel takes are named, with those that one takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pdx.checkpoint.kernel_limits import check_kernel_limits, kernel_problems
from pdx.checkpoint.model import ModelConfig
from pdx.errors import CheckpointError
from tests.checkpoint.test_deepseek import R1
from tests.checkpoint.test_model import load
from tests.checkpoint.test_weight_sizes import QWEN3_CODER


def problems(
    config: ModelConfig, *, tp_size: int = 1, page_size: int = 16, kv_dtype: str = "bfloat16"
) -> list[str]:
    return list(
        kernel_problems(
            config, tp_size=tp_size, page_size=page_size, dtype="bfloat16", kv_dtype=kv_dtype
        )
    )


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8"])
@pytest.mark.parametrize("tp_size", [1, 8])
def test_published_models_have_sizes_that_kernels_take(
    tmp_path: Path, tp_size: int, kv_dtype: str
) -> None:
    for fields in (R1, QWEN3_CODER):
        config = load(tmp_path, **fields)
        assert not problems(config, tp_size=tp_size, page_size=64, kv_dtype=kv_dtype)


@pytest.mark.parametrize(
    ("name", "size", "wanted"),
    [
        ("kv_lora_rank", 48, "a power of 2 from 16 to 512"),
        ("kv_lora_rank", 1024, "a power of 2 from 16 to 512"),
        ("qk_rope_head_dim", 24, "a power of 2 from 16 to 128"),
        ("qk_rope_head_dim", 8, "a power of 2 from 16 to 128"),
        ("qk_nope_head_dim", 96, "a power of 2 from 16 to 256"),
        ("v_head_dim", 12, "a power of 2 from 16 to 256"),
        ("q_lora_rank", 1 << 17, "at most 65,536"),
        ("hidden_size", 1 << 17, "at most 65,536"),
        ("num_experts_per_tok", 65, "at most 64"),
    ],
)
def test_what_no_kernel_takes_is_named(tmp_path: Path, name: str, size: int, wanted: str) -> None:
    [problem] = problems(load(tmp_path, **{**R1, name: size}))
    assert problem.startswith(f"{name} = {size:,} (")
    assert wanted in problem


def test_quarters_of_a_float8_record_are_larger(tmp_path: Path) -> None:
    config = load(tmp_path, **{**R1, "kv_lora_rank": 32})
    assert not problems(config)
    [problem] = problems(config, kv_dtype="float8")
    assert "kv_lora_rank = 32 (a power of 2 from 64" in problem


@pytest.mark.parametrize(
    ("head_dim", "is_taken"), [(8, False), (10, True), (256, True), (258, False)]
)
def test_heads_of_any_even_size_within_bounds(
    tmp_path: Path, head_dim: int, is_taken: bool
) -> None:
    found = problems(load(tmp_path, **{**QWEN3_CODER, "head_dim": head_dim}))
    assert bool(found) is not is_taken
    assert all(f"head_dim = {head_dim} (an even size from 10 to 256" in each for each in found)


def test_heads_that_share_a_kv_head_fit_one_tile(tmp_path: Path) -> None:
    config = load(tmp_path, **{**QWEN3_CODER, "num_attention_heads": 256, "num_key_value_heads": 1})
    [problem] = problems(config)
    assert "num_attention_heads / num_key_value_heads = 256" in problem
    assert not problems(config, tp_size=2)
    assert problems(dataclasses.replace(config, head_dim=256), tp_size=2)


def test_pages_and_blocks(tmp_path: Path) -> None:
    config = load(tmp_path, **QWEN3_CODER)
    [problem] = problems(config, page_size=1 << 21)
    assert "pages of 2,097,152 tokens (--page-size; at most 1,048,575)" in problem
    blocks = {"quant_method": "fp8", "weight_block_size": [64, 128]}
    [problem] = problems(load(tmp_path, **{**QWEN3_CODER, "quantization_config": blocks}))
    assert problem == "weight_block_size = 64 x 128 (128 x 128 is wanted)"


def test_the_error_says_what_runs_it(tmp_path: Path) -> None:
    config = load(tmp_path, **{**R1, "kv_lora_rank": 48, "v_head_dim": 3})
    with pytest.raises(CheckpointError, match=r"kv_lora_rank = 48 .*; v_head_dim = 3") as refused:
        check_kernel_limits(config, tp_size=1, page_size=16, dtype="bfloat16", kv_dtype="bfloat16")
    assert "--device cpu" in str(refused.value.hint)
