"""What is counted from a configuration is what the model has that is built of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pdx.checkpoint.model import ModelConfig
from pdx.checkpoint.weight_sizes import Split, rank_weight_bytes, weight_groups
from tests.checkpoint.test_deepseek import R1
from tests.checkpoint.test_model import load

#: As Qwen3-Coder-480B-A35B-Instruct's own says it.
QWEN3_CODER: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 6144,
    "intermediate_size": 8192,
    "moe_intermediate_size": 2560,
    "num_hidden_layers": 62,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 160,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rope_theta": 10000000,
}


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek", "biased"])
def test_a_rank_holds_what_its_modules_have(
    family: str, tp_size: int, request: pytest.FixtureRequest
) -> None:
    import torch

    from pdx.kernels.ops import REFERENCE_OPS
    from pdx.models.registry import build_model
    from tests.weights.ranks import LastOf

    name = "tiny_llama" if family == "biased" else f"tiny_{family}"
    config = ModelConfig.load(request.getfixturevalue(name))
    if family == "biased":
        config = dataclasses.replace(config, attention_bias=True, mlp_bias=True)
    with torch.device("meta"):
        model = build_model(config, REFERENCE_OPS, LastOf(tp_size))
    counted = sum(group.values_of_rank(config, tp_size) for group in weight_groups(config))
    assert counted == sum(parameter.numel() for parameter in model.parameters())


def test_published_sizes(tmp_path: Path) -> None:
    r1 = load(tmp_path, **R1)
    assert sum(group.num_values for group in weight_groups(r1)) == pytest.approx(671e9, rel=1e-3)
    coder = load(tmp_path, **QWEN3_CODER)
    assert sum(group.num_values for group in weight_groups(coder)) == pytest.approx(480e9, rel=1e-2)


def test_float8_is_a_byte_a_value_and_scales_where_it_is_kept(tmp_path: Path) -> None:
    config = load(tmp_path, **R1)
    kept = rank_weight_bytes(config, 8, 2, keeps_float8=True)
    widened = rank_weight_bytes(config, 8, 2, keeps_float8=False)
    assert 84e9 < kept < 87e9
    assert 1.95 * kept < widened < 2 * kept


def test_keys_and_values_are_held_again_by_ranks_beyond_the_heads(tmp_path: Path) -> None:
    config = load(tmp_path, **QWEN3_CODER)
    [group] = [g for g in weight_groups(config) if g.split is Split.KV_HEADS]
    assert group.values_of_rank(config, 16) == group.values_of_rank(config, 8)
    assert group.values_of_rank(config, 4) == 2 * group.values_of_rank(config, 8)
