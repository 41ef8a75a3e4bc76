"""No number in a config.json ends in anything but a model or an error that names it, and soon."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdx.checkpoint.model import ModelConfig
from pdx.checkpoint.stored_tensors import draft_tensors, wanted_tensors
from pdx.checkpoint.weight_sizes import weight_groups
from pdx.errors import CheckpointError, ConfigError
from pdx.kv.geometry import check_tp_size
from tests.checkpoint.test_deepseek import R1
from tests.checkpoint.test_weight_sizes import QWEN3_CODER

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
FAMILIES = {"llama": LLAMA, "qwen3": QWEN3, "qwen3_moe": QWEN3_CODER, "deepseek": R1}
FIELDS = [
    (family, name)
    for family, fields in FAMILIES.items()
    for name, value in fields.items()
    if isinstance(value, int | float) and not isinstance(value, bool)
]
#: What no model has in any of these fields, but for ids of tokens.
WRONG = [-1, 0, True, False, 1.5, 10**9, 10**30, 10**400, 1e300, "64", [], {}, "1e9", -(10**9)]
#: Fields that may be 0, or as large as that, or are ids, or training's.
MAY_BE = re.compile(
    r".*_token_id|.*position_embeddings|.*loss_alpha|.*_std|.*_range|.*_dropout|pretraining_tp"
    r"|first_k_dense_replace|num_nextn_predict_layers|ep_size|rope_theta|rms_norm_eps"
    r"|routed_scaling_factor|decoder_sparse_step|.*(size|rank|dim|experts|loss_coef|freq)"
)


def load(folder: Path, fields: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    return ModelConfig.load(folder)


def use(config: ModelConfig) -> None:
    """All that is computed of a configuration before a rank starts."""
    weight_groups(config)
    for tp_size in (1, 2, 7):
        try:
            check_tp_size(config, tp_size)
        except ConfigError:
            continue


@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize(("family", "name"), FIELDS)
def test_a_wrong_number_is_refused_by_name(
    tmp_path: Path, family: str, name: str, value: object
) -> None:
    try:
        config = load(tmp_path, {**FAMILIES[family], name: value})
    except CheckpointError as error:
        told = error.message
    else:
        assert MAY_BE.fullmatch(name), f"{name} = {value} is taken"
        use(config)
        return
    # A size that another one must divide is named by either.
    assert name in told or re.search(r"\b(num|n|head|first|topk)_\w+ = ", told)
    assert len(told) < 1000


@pytest.mark.parametrize(
    "name",
    ["num_hidden_layers", "num_attention_heads", "vocab_size", "hidden_size", "intermediate_size"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_number_too_large_to_count_to_is_refused(tmp_path: Path, family: str, name: str) -> None:
    # Of DeepSeek's heads each has a key of its own.
    fields = {**FAMILIES[family], **({"num_key_value_heads": None} if family == "deepseek" else {})}
    with pytest.raises(CheckpointError, match=f"{name} = 1{'0' * 12} is not served: at most"):
        load(tmp_path, {**fields, name: 10**12})


def test_experts_of_all_layers_are_bounded_together(tmp_path: Path) -> None:
    many = {"num_hidden_layers": 1000, "n_routed_experts": 4096, "n_group": 8}
    with pytest.raises(CheckpointError, match=r"n_routed_experts = 4096 .* 1,000 layers at most"):
        load(tmp_path, {**R1, **many})


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 1e300, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 10**400, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 10**12},
        {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "mscale": -1},
        {"rope_type": "linear", "factor": float("nan")},
        {"rope_type": "linear", "factor": float("inf")},
    ],
)
def test_scalings_out_of_all_bounds(tmp_path: Path, scaling: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"is not served"):
        load(tmp_path, {**LLAMA, "rope_scaling": scaling})


def test_a_file_nested_without_end_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        ModelConfig.load(tmp_path)


def test_ids_outside_the_vocabulary_end_nothing(tmp_path: Path) -> None:
    config = load(tmp_path, {**LLAMA, "eos_token_id": [-1, 2, 512, 10**30, 511]})
    assert config.eos_token_ids == (2, 511)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), family=st.sampled_from(sorted(FAMILIES)))
def test_any_numbers_give_a_model_or_a_refusal(
    tmp_path: Path, data: st.DataObject, family: str
) -> None:
    fields = dict(FAMILIES[family])
    names = [name for of, name in FIELDS if of == family]
    number = st.one_of(
        st.integers(-2, 64), st.integers(-(10**12), 10**12), st.floats(), st.booleans(), st.none()
    )
    for name in data.draw(st.lists(st.sampled_from(names), max_size=3)):
        fields[name] = data.draw(number, label=name)
    try:
        config = load(tmp_path, fields)
    except CheckpointError:
        return
    use(config)
    if config.num_layers * (1 if config.experts is None else config.experts.num_experts) < 4096:
        wanted_tensors(config, ())
        draft_tensors(config, ())
