"""ModelConfig: both layouts are read, what is not served is refused by name and value."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pdx.checkpoint.model import Family, ModelConfig
from pdx.checkpoint.rope import Llama3Scaling, RopeConfig
from pdx.errors import CheckpointError

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "max_window_layers": 3,
    "sliding_window": None,
    "use_sliding_window": False,
}


def load(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    """Write BASE with changes (a value of ... takes the key out) and load it."""
    fields = {k: v for k, v in {**BASE, **changes}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.load(folder)


def test_both_layouts_of_one_model_give_equal_facts(tiny_llama: Path, tiny_llama_v5: Path) -> None:
    config = ModelConfig.load(tiny_llama)
    assert config == ModelConfig.load(tiny_llama_v5)
    assert config.family is Family.LLAMA
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (
        3,
        4,
        2,
        32,
    )
    assert config.rope == RopeConfig(
        theta=500000.0,
        scaling=Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_len=64
        ),
    )
    assert config.eos_token_ids == (508, 510)
    assert config.dtype == "bfloat16"


def test_absent_optional_fields_have_the_class_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, num_key_value_heads=..., torch_dtype=..., eos_token_id=...)
    assert config.num_kv_heads == config.num_heads
    assert config.head_dim == 32
    assert config.rope == RopeConfig(theta=10000.0, scaling=None)
    assert config.dtype == "float32"
    assert config.eos_token_ids == ()
    assert config.bos_token_id is None
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)


def test_head_dim_of_its_own_is_kept(tmp_path: Path) -> None:
    assert load(tmp_path, head_dim=64).head_dim == 64


def test_qwen3(tmp_path: Path) -> None:
    config = load(tmp_path, {"eos_token_id": [2, 9]}, **QWEN3, rope_theta=1e6)
    assert config.family is Family.QWEN3
    assert config.head_dim == 128
    assert config.rope == RopeConfig(theta=1e6, scaling=None)
    assert config.eos_token_ids == (2, 9)
    assert not config.attention_bias
    assert load(tmp_path, **QWEN3, attention_bias=True).attention_bias


def test_qwen3_window_that_is_off_says_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, **QWEN3) == load(
        tmp_path, **{**QWEN3, "sliding_window": 4096, "max_window_layers": 1}
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_sliding_window": True}, "use_sliding_window = true"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"head_dim": ...}, "'head_dim' is missing"),
        ({"head_dim": None, "num_key_value_heads": ...}, "'head_dim', 'num_key_value_heads' are"),
        ({"max_position_embeddings": ...}, "'max_position_embeddings' is missing"),
        ({"mlp_bias": True}, "mlp_bias = true"),
        ({"model_type": "qwen2"}, 'model_type = "qwen2"'),
        ({"num_experts": 128}, "num_experts = 128"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ],
)
def test_what_is_not_served_of_qwen3_is_refused_by_name_and_value(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(named)):
        load(tmp_path, **{**QWEN3, **changes})


@pytest.mark.parametrize(
    ("stated", "factor", "original", "expected"),
    [(40960, 4.0, 32768, 131072), (163840, 40, 4096, 163840), (512, 2.0, 64, 512)],
)
def test_yarn_extends_the_context(
    tmp_path: Path, stated: int, factor: float, original: int, expected: int
) -> None:
    yarn = {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    config = load(tmp_path, max_position_embeddings=stated, rope_scaling=yarn)
    assert config.max_position_embeddings == expected


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_other_scalings_leave_the_stated_context(tmp_path: Path, kind: str) -> None:
    config = load(tmp_path, rope_scaling={"type": kind, "factor": 4.0})
    assert config.max_position_embeddings == 512


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (2, None, (2,)),
        ([7, 2], None, (7, 2)),
        (2, {"eos_token_id": [2, 9]}, (2, 9)),
        (..., {"eos_token_id": 9}, (9,)),
        (2, {}, (2,)),
    ],
)
def test_eos_ids_are_taken_from_both_files(
    tmp_path: Path, own: Any, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert load(tmp_path, generation, eos_token_id=own).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": ...}, "architectures"),
        ({"model_type": "mistral"}, 'model_type = "mistral"'),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ({"quantization_config": {"quant_method": "fp8"}}, 'quantization_config = {"quant_method"'),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"attention_multiplier": 0.1}, "attention_multiplier = 0.1"),
        ({"a_switch": False}, "a_switch = false"),
        ({"hidden_size": ...}, "'hidden_size' is missing"),
        ({"hidden_size": -1}, "hidden_size = -1"),
        ({"num_hidden_layers": True}, "num_hidden_layers = true"),
        ({"num_hidden_layers": "3"}, 'num_hidden_layers = "3"'),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"head_dim": 33}, "head_dim = 33"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1"),
        ({"torch_dtype": "float8_e4m3fn"}, 'dtype = "float8_e4m3fn"'),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
)
def test_what_is_not_served_is_refused_by_name_and_value(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(named)):
        load(tmp_path, **changes)


def test_unknown_null_fields_and_bookkeeping_are_accepted(tmp_path: Path) -> None:
    assert load(
        tmp_path, a_new_feature=None, use_cache=True, _name_or_path="x", pretraining_tp=1
    ) == load(tmp_path)


@pytest.mark.parametrize("content", [None, "{", "[]", '"text"'])
def test_missing_or_damaged_config_is_a_checkpoint_error(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": "64"}, 'hidden_size = "64" is not served: an integer is wanted'),
        ({"hidden_size": -64}, "hidden_size = -64 is not served: a positive integer is wanted"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0.0 is not served: a positive number is wanted"),
        ({"attention_bias": 1}, "attention_bias = 1 is not served: true or false is wanted"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu" is not served: served is "silu"'),
        ({"head_dim": 15}, "head_dim = 15 is not served: an even one is wanted"),
        ({"num_key_value_heads": 3}, "= 3 is not served: it does not divide num_attention_heads"),
    ],
)
def test_a_refusal_says_what_is_wanted(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(told)):
        load(tmp_path, **changes)
