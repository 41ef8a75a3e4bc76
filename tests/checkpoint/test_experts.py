"""The sparse layers of a config.json: which they are, what is in them, what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pdx.checkpoint.experts import ExpertsConfig, SoftmaxRouting
from pdx.checkpoint.model import Family
from pdx.errors import CheckpointError
from tests.checkpoint.test_model import QWEN3, load

QWEN3_MOE: dict[str, Any] = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "router_aux_loss_coef": 0.0,
    "qkv_bias": False,
    "use_qk_norm": True,
    "shared_expert_intermediate_size": 0,
}


def test_qwen3_moe(tmp_path: Path) -> None:
    config = load(tmp_path, **QWEN3_MOE)
    assert config.family is Family.QWEN3_MOE
    assert config.experts == ExpertsConfig(
        layers=frozenset({0, 1, 2}),
        num_experts=16,
        num_chosen=4,
        inner_size=32,
        shared_inner_size=0,
        routing=SoftmaxRouting(renormalise=True),
    )
    assert load(tmp_path, **QWEN3).experts is None


def test_both_layouts_of_qwen3_moe_give_equal_facts(tmp_path: Path) -> None:
    v5 = {**QWEN3_MOE, "num_experts": ..., "num_local_experts": 16}
    assert load(tmp_path, **QWEN3_MOE) == load(tmp_path, **v5)


def test_weights_of_qwen3_moe_are_not_renormalised_unless_it_says_so(tmp_path: Path) -> None:
    experts = load(tmp_path, **{**QWEN3_MOE, "norm_topk_prob": ...}).experts
    assert experts is not None
    assert experts.routing == SoftmaxRouting(renormalise=False)


@pytest.mark.parametrize(
    ("step", "dense", "sparse"),
    [
        (1, [], {0, 1, 2}),
        (1, [0, 2], {1}),
        (2, [], {1}),
        (3, [], {2}),
        (2, [1], None),
        (4, [], None),
    ],
)
def test_layers_are_sparse_by_step_and_list(
    tmp_path: Path, step: int, dense: list[int], sparse: set[int] | None
) -> None:
    changes = {"decoder_sparse_step": step, "mlp_only_layers": dense}
    experts = load(tmp_path, **{**QWEN3_MOE, **changes}).experts
    assert (None if experts is None else set(experts.layers)) == sparse


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts": ...}, "'num_experts' is missing"),
        ({"num_experts_per_tok": ...}, "'num_experts_per_tok' is missing"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok = 17"),
        ({"moe_intermediate_size": ...}, "'moe_intermediate_size' is missing"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers = [3]"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers = [true]"),
        ({"qkv_bias": True}, "qkv_bias = true"),
        ({"use_qk_norm": False}, "use_qk_norm = false"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64"),
        ({"use_sliding_window": True}, "use_sliding_window = true"),
        ({"model_type": "qwen3"}, 'model_type = "qwen3"'),
    ],
)
def test_what_is_not_served_of_qwen3_moe_is_refused_by_name_and_value(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(named)):
        load(tmp_path, **{**QWEN3_MOE, **changes})
