"""DeepSeek-V3's config.json: latents, experts in groups, layers that draft, float8 blocks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pdx.checkpoint.experts import ExpertsConfig, GroupedRouting
from pdx.checkpoint.mla import MlaConfig
from pdx.checkpoint.model import Family, ModelConfig
from pdx.checkpoint.quantization import Float8Blocks
from pdx.checkpoint.rope import YarnScaling
from pdx.errors import CheckpointError
from pdx.kv.geometry import check_tp_size, kv_layout
from tests.checkpoint.test_model import load

FLOAT8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
#: As DeepSeek-R1's own says it.
R1: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": FLOAT8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_r1(tmp_path: Path) -> None:
    config = load(tmp_path, **R1)
    assert config.family is Family.DEEPSEEK_V3
    assert config.mla == MlaConfig(
        q_lora_rank=1536, latent_dim=512, nope_dim=128, rope_dim=64, v_dim=128, interleaved=True
    )
    assert config.experts == ExpertsConfig(
        layers=frozenset(range(3, 61)),
        num_experts=256,
        num_chosen=8,
        inner_size=2048,
        shared_inner_size=2048,
        routing=GroupedRouting(num_groups=8, num_chosen_groups=4, renormalise=True, scale=2.5),
    )
    assert (config.num_kv_heads, config.head_dim, config.rope_dim) == (1, 192, 64)
    assert config.num_draft_layers == 1
    assert config.quantization == Float8Blocks(num_rows=128, num_columns=128)
    assert isinstance(config.rope.scaling, YarnScaling)
    assert (config.rope.scaling.attention_factor, config.rope.scaling.mscale_all_dim) == (1.0, 1.0)


def test_kv_of_a_token_of_r1_is_one_record_a_layer_on_every_rank(tmp_path: Path) -> None:
    config = load(tmp_path, **R1)
    for tp_size in (1, 8, 128):
        check_tp_size(config, tp_size)
        layout = kv_layout(config, 64, 10, "bfloat16", tp_size)
        assert layout.token_bytes == 70_272
        assert layout.page_bytes == 64 * 576 * 2


def test_both_layouts_give_equal_facts(tmp_path: Path) -> None:
    rope = {**R1["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000}
    own = {"rope_scaling": ..., "rope_theta": ..., "rope_parameters": rope}
    own |= {"head_dim": 64, "qk_head_dim": 192, "rope_interleave": True}
    own |= {"torch_dtype": ..., "dtype": "bfloat16"}
    assert load(tmp_path, **R1) == load(tmp_path, **{**R1, **own})


def test_queries_without_a_latent_say_so_by_null(tmp_path: Path) -> None:
    mla = load(tmp_path, **{**R1, "q_lora_rank": None}).mla
    assert mla is not None
    assert mla.q_lora_rank is None
    with pytest.raises(CheckpointError, match="'q_lora_rank' is missing"):
        load(tmp_path, **{**R1, "q_lora_rank": ...})


def test_all_layers_may_be_dense(tmp_path: Path) -> None:
    dense = {**R1, "first_k_dense_replace": 61, "num_nextn_predict_layers": 0}
    assert load(tmp_path, **dense).experts is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scoring_func": "softmax"}, 'scoring_func = "softmax"'),
        ({"topk_method": "greedy"}, 'topk_method = "greedy"'),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8"),
        ({"head_dim": 128}, "head_dim = 128"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63"),
        ({"n_group": 7}, "n_group = 7 is not served: 256 n_routed_experts make no even groups"),
        ({"n_group": 256}, "n_group = 256"),
        ({"topk_group": 9}, "topk_group = 9 is not served: n_group is 8"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok = 129 is not served: there are 128"),
        ({"n_shared_experts": None}, "'n_shared_experts' is missing"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        ({"first_k_dense_replace": 62}, "= 62 is not served: the model has 61 layers"),
        ({"first_k_dense_replace": 61}, "num_nextn_predict_layers = 1 is not served: a layer that"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers = -1"),
        ({"routed_scaling_factor": ...}, "'routed_scaling_factor' is missing"),
        ({"kv_lora_rank": ...}, "'kv_lora_rank' is missing"),
        ({"quantization_config": {"quant_method": "gptq"}}, 'quantization_config = {"quant_meth'),
        ({"quantization_config": {**FLOAT8, "weight_block_size": None}}, "quantization_config ="),
        ({"quantization_config": {**FLOAT8, "weight_block_size": [0, 1]}}, "weight_block_size ="),
        ({"quantization_config": {**FLOAT8, "fmt": "e5m2"}}, 'fmt = "e5m2"'),
        (
            {"quantization_config": {**FLOAT8, "activation_scheme": "static"}},
            'activation_scheme = "static"',
        ),
        ({"quantization_config": {**FLOAT8, "scale_fmt": "e5m2"}}, 'scale_fmt = "e5m2"'),
    ],
)
def test_what_is_not_served_is_refused_by_name_and_value(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(named)):
        load(tmp_path, **{**R1, **changes})


def test_blocks_count_partial_ones() -> None:
    blocks = Float8Blocks(num_rows=128, num_columns=64)
    assert blocks.scale_shape((576, 7168)) == (5, 112)
    assert blocks.scale_shape((4, 128, 65)) == (4, 1, 2)


def test_other_families_may_be_stored_in_float8_too(tmp_path: Path) -> None:
    config: ModelConfig = load(tmp_path, quantization_config=FLOAT8)
    assert config.quantization == Float8Blocks(num_rows=128, num_columns=128)
