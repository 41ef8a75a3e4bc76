"""Proof that the comparison with transformers catches what engines get wrong while still writing
fluent text: each mistake is made in our own model, and must move the logits far.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdx.checkpoint.experts import SoftmaxRouting
from pdx.checkpoint.model import ModelConfig
from pdx.checkpoint.rope import LinearScaling, Llama3Scaling, YarnScaling
from pdx.errors import CheckpointError
from pdx.kernels.batch import ForwardBatch
from pdx.kernels.ops import REFERENCE_OPS, Ops
from pdx.models.experts import Experts
from pdx.models.qwen3 import Qwen3Attention
from pdx.models.registry import CausalLM
from tests.models.comparison import LOGIT_TOLERANCE, altered, loaded
from tests.models.mistakes import Mistake, eps, experts, rope
from tests.oracle.transformers_oracle import Oracle

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
    return REFERENCE_OPS.rope(pairs, cos, sin)


def scaled_by(head_dim: int) -> Ops:
    def attend(q: Tensor, kv: Tensor, batch: ForwardBatch, scale: float, **options: Any) -> Tensor:
        return REFERENCE_OPS.paged_attention(q, kv, batch, head_dim**-0.5, **options)

    return replace(REFERENCE_OPS, paged_attention=attend)


def attentions(model: CausalLM) -> list[Qwen3Attention]:
    return [module for module in model.modules() if isinstance(module, Qwen3Attention)]


def without_head_norms(model: CausalLM, *names: str) -> None:
    for attention in attentions(model):
        for name in names:
            setattr(attention, name, nn.Identity())


def norms_after_rope(model: CausalLM) -> None:
    for attention in attentions(model):
        q_norm, k_norm = attention.q_norm, attention.k_norm
        num_heads = attention.q_proj.weight.shape[0] // q_norm.weight.shape[0]

        def rope(
            x: Tensor,
            cos: Tensor,
            sin: Tensor,
            q_norm: nn.Module = q_norm,
            k_norm: nn.Module = k_norm,
            num_heads: int = num_heads,
        ) -> Tensor:
            norm = q_norm if x.shape[1] == num_heads else k_norm
            normed: Tensor = norm(REFERENCE_OPS.rope(x, cos, sin))
            return normed

        attention._ops = replace(REFERENCE_OPS, rope=rope)
    without_head_norms(model, "q_norm", "k_norm")


def yarn(**changes: Any) -> Mistake:
    def change(config: ModelConfig) -> ModelConfig:
        assert isinstance(config.rope.scaling, YarnScaling)
        scaling = replace(config.rope.scaling, **changes)
        return replace(config, rope=replace(config.rope, scaling=scaling))

    return Mistake(config=change)


LLAMA3_WITHOUT_BLEND = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=1.0001, original_len=64
)
BOTH = {
    "theta missed": rope(theta=1e4),
    "pairs interleaved": Mistake(ops=replace(REFERENCE_OPS, rope=interleaved)),
    "eps ten times too large": eps(10.0),
    "eps ten times too small": eps(0.1),
}
LLAMA = BOTH | {
    "scaling ignored": rope(scaling=None),
    "scaling taken as linear": rope(scaling=LinearScaling(factor=8.0)),
    "high_freq_factor ignored": rope(scaling=LLAMA3_WITHOUT_BLEND),
}
QWEN3 = BOTH | {
    "no norm of q": Mistake(change=lambda model: without_head_norms(model, "q_norm")),
    "no norm of k": Mistake(change=lambda model: without_head_norms(model, "k_norm")),
    "no norm of heads": Mistake(change=lambda model: without_head_norms(model, "q_norm", "k_norm")),
    "norm after rope": Mistake(change=norms_after_rope),
    "scores scaled by hidden / heads": Mistake(ops=scaled_by(64 // 4)),
}
QWEN3_YARN = {
    "scaling ignored": rope(scaling=None),
    "scaling taken as linear": rope(scaling=LinearScaling(factor=4.0)),
    "attention factor left out": yarn(attention_factor=1.0),
    "betas swapped for others": yarn(beta_fast=4.0),
    "original length from the config": yarn(original_len=512),
}


def weights_renormalised_in(dtype: torch.dtype) -> Ops:
    def route(logits: Tensor, num_chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        weights, ids = REFERENCE_OPS.softmax_routing(logits.to(dtype), num_chosen, renormalise)
        return weights.to(dtype).float(), ids

    return replace(REFERENCE_OPS, softmax_routing=route)


def up_before_gate(model: CausalLM) -> None:
    for module in model.modules():
        if isinstance(module, Experts):
            gate, up = module.gate_up_proj.chunk(2, dim=1)
            module.gate_up_proj = nn.Parameter(torch.cat([up, gate], 1), requires_grad=False)


QWEN3_MOE = QWEN3 | {
    "weights not renormalised": experts(routing=SoftmaxRouting(renormalise=False)),
    "an expert too few": experts(num_chosen=3),
    "an expert too many": experts(num_chosen=5),
    "gate and up swapped": Mistake(change=up_before_gate),
    "routed in bfloat16": Mistake(ops=weights_renormalised_in(torch.bfloat16)),
}


@pytest.fixture
def yarn_folder(tiny_qwen3: Path, tmp_path: Path) -> Path:
    return altered(tiny_qwen3, tmp_path / "yarn", rope_scaling=YARN)


@pytest.mark.parametrize("name", LLAMA)
def test_mistake_in_llama_is_caught(
    name: str, tiny_llama: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    moved = LLAMA[name].moves(tiny_llama, tiny_oracle, tiny_prompt_ids[:170])
    assert moved > 100 * LOGIT_TOLERANCE


@pytest.mark.parametrize("name", QWEN3)
def test_mistake_in_qwen3_is_caught(
    name: str, tiny_qwen3: Path, qwen3_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    moved = QWEN3[name].moves(tiny_qwen3, qwen3_oracle, tiny_prompt_ids[:170])
    assert moved > 100 * LOGIT_TOLERANCE


@pytest.mark.parametrize("name", QWEN3_MOE)
def test_mistake_in_qwen3_moe_is_caught(
    name: str, tiny_qwen3_moe: Path, qwen3_moe_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    moved = QWEN3_MOE[name].moves(tiny_qwen3_moe, qwen3_moe_oracle, tiny_prompt_ids[:170])
    assert moved > 100 * LOGIT_TOLERANCE


@pytest.mark.parametrize("name", QWEN3_YARN)
def test_mistake_in_yarn_is_caught(
    name: str, yarn_folder: Path, tiny_prompt_ids: list[int]
) -> None:
    moved = QWEN3_YARN[name].moves(yarn_folder, Oracle(yarn_folder), tiny_prompt_ids[:170])
    assert moved > 100 * LOGIT_TOLERANCE


def test_yarn_left_out_below_the_original_length_is_caught(
    yarn_folder: Path, tiny_prompt_ids: list[int]
) -> None:
    mistake, ids = QWEN3_YARN["scaling ignored"], tiny_prompt_ids[:33]
    assert mistake.moves(yarn_folder, Oracle(yarn_folder), ids) > 100 * LOGIT_TOLERANCE


def test_head_size_of_hidden_over_heads_does_not_load(tiny_qwen3: Path) -> None:
    wrong = replace(ModelConfig.load(tiny_qwen3), head_dim=16)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is \[128, 64\], wanted \[64, 64\]"):
        loaded(tiny_qwen3, config=wrong)


@pytest.mark.parametrize(
    ("folder", "oracle"),
    [
        ("tiny_llama", "tiny_oracle"),
        ("tiny_qwen3", "qwen3_oracle"),
        ("tiny_qwen3_moe", "qwen3_moe_oracle"),
    ],
)
def test_no_mistake_is_no_difference(
    folder: str, oracle: str, tiny_prompt_ids: list[int], request: pytest.FixtureRequest
) -> None:
    # The changes above go through the same machinery; by itself it moves nothing.
    path, judge = request.getfixturevalue(folder), request.getfixturevalue(oracle)
    assert Mistake().moves(path, judge, tiny_prompt_ids[:170]) < LOGIT_TOLERANCE
