"""Each of what engines get wrong about DeepSeek-V3 moves the logits far: see test_mistakes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pdx.models.deepseek_v3
import pdx.weights.load
from pdx.checkpoint.model import ModelConfig
from pdx.checkpoint.rope import YarnScaling
from pdx.kernels.ops import REFERENCE_OPS, Ops
from pdx.models.deepseek_v3 import DeepseekMoe, MlaAttention
from pdx.models.registry import CausalLM
from tests.models.comparison import LOGIT_TOLERANCE
from tests.models.mistakes import Mistake, experts, rope
from tests.oracle.transformers_oracle import Oracle


def routed(
    *,
    bias_in_weights: bool = False,
    no_bias: bool = False,
    fill: float = float("-inf"),
    best_alone: bool = False,
    softmax: bool = False,
) -> Ops:
    """A router with mistakes."""

    def route(
        logits: Tensor,
        bias: Tensor,
        num_chosen: int,
        num_groups: int,
        num_chosen_groups: int,
        renormalise: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        scores = logits.softmax(-1) if softmax else logits.sigmoid()
        biased = scores if no_bias else scores + bias
        by_group = biased.view(len(logits), num_groups, -1)
        of_groups = by_group.topk(1 if best_alone else 2, dim=-1).values.sum(-1)
        best = of_groups.topk(num_chosen_groups, dim=-1).indices
        left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, best, False)
        ids = by_group.masked_fill(left_out[..., None], fill).flatten(1).topk(num_chosen).indices
        weights = (biased if bias_in_weights else scores).gather(1, ids)
        return (weights / weights.sum(-1, keepdim=True) if renormalise else weights) * scale, ids

    return replace(REFERENCE_OPS, grouped_routing=route)


def routing(**changes: Any) -> Mistake:
    def change(config: ModelConfig) -> ModelConfig:
        assert config.experts is not None
        return replace(
            config,
            experts=replace(config.experts, routing=replace(config.experts.routing, **changes)),
        )

    return Mistake(config=change)


def yarn(**changes: Any) -> Mistake:
    def change(config: ModelConfig) -> ModelConfig:
        assert isinstance(config.rope.scaling, YarnScaling)
        scaling = replace(config.rope.scaling, **changes)
        return replace(config, rope=replace(config.rope, scaling=scaling))

    return Mistake(config=change)


def scores_times(factor: float) -> Mistake:
    def change(model: CausalLM) -> None:
        for module in model.modules():
            if isinstance(module, MlaAttention):
                module._scale *= factor

    return Mistake(change=change)


def without_shared_experts(model: CausalLM) -> None:
    for module in model.modules():
        if isinstance(module, DeepseekMoe):
            module.shared_experts.down_proj.weight.zero_()


def not_interleaved(config: ModelConfig) -> ModelConfig:
    assert config.mla is not None
    return replace(config, mla=replace(config.mla, interleaved=False))


ALL = {
    "bias in the weights": Mistake(ops=routed(bias_in_weights=True)),
    "bias ignored": Mistake(ops=routed(no_bias=True)),
    "softmax for sigmoid": Mistake(ops=routed(softmax=True)),
    "weights not renormalised": routing(renormalise=False),
    "weights not scaled": routing(scale=1.0),
    "an expert too few": experts(num_chosen=1),
    "no shared experts": Mistake(change=without_shared_experts),
    "pairs not interleaved": Mistake(config=not_interleaved),
}
GROUPED = ALL | {
    "groups ignored": routing(num_groups=1, num_chosen_groups=1),
    "a group's best expert for its two best": Mistake(ops=routed(best_alone=True)),
}
DEEPSEEK = GROUPED | {
    "YaRN ignored": rope(scaling=None),
    "scores not scaled for YaRN": yarn(mscale_all_dim=0.0),
    "rotated vectors lengthened as well": yarn(attention_factor=1.2079),
    "scores scaled by the value's size": scores_times((96 / 32) ** 0.5),
}
FLOAT8 = GROUPED | {
    # Through the bias some experts of the best groups are below 0.
    "left out groups filled with 0": Mistake(ops=routed(fill=0.0)),
}


@pytest.mark.parametrize("name", DEEPSEEK)
def test_mistake_in_deepseek_is_caught(
    name: str, tiny_deepseek: Path, deepseek_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    moved = DEEPSEEK[name].moves(tiny_deepseek, deepseek_oracle, tiny_prompt_ids[:170])
    assert moved > 100 * LOGIT_TOLERANCE


@pytest.mark.parametrize("name", ALL)
def test_mistake_without_a_query_latent_is_caught(
    name: str,
    tiny_deepseek_plain: Path,
    deepseek_plain_oracle: Oracle,
    tiny_prompt_ids: list[int],
) -> None:
    moved = ALL[name].moves(tiny_deepseek_plain, deepseek_plain_oracle, tiny_prompt_ids[:170])
    assert moved > 100 * LOGIT_TOLERANCE


@pytest.mark.parametrize("name", FLOAT8)
def test_mistake_with_float8_is_caught(
    name: str,
    tiny_deepseek_float8: Path,
    deepseek_float8_oracle: Oracle,
    tiny_prompt_ids: list[int],
) -> None:
    moved = FLOAT8[name].moves(tiny_deepseek_float8, deepseek_float8_oracle, tiny_prompt_ids[:170])
    assert moved > 100 * LOGIT_TOLERANCE


def test_blocks_of_even_sizes_are_caught(
    tiny_deepseek_float8: Path,
    deepseek_float8_oracle: Oracle,
    tiny_prompt_ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As transformers reads them: 160 rows in 2 blocks would be 80 and 80, not 128 and 32.
    def even(stored: Tensor, scales: Tensor, source: object, blocks: object) -> Tensor:
        for dim in (0, 1):
            num_blocks, size = scales.shape[dim], stored.shape[dim]
            block = torch.arange(size) * num_blocks // size
            scales = scales.index_select(dim, block)
        return stored.float() * scales

    monkeypatch.setattr(pdx.weights.load, "dequantised", even)
    ids = tiny_prompt_ids[:170]
    moved = Mistake().moves(tiny_deepseek_float8, deepseek_float8_oracle, ids)
    assert moved > 100 * LOGIT_TOLERANCE


def test_latent_norms_with_the_models_epsilon_are_caught(
    tiny_deepseek_plain: Path,
    deepseek_plain_oracle: Oracle,
    tiny_prompt_ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The smallest of all: 1e-5 for 1e-6 beside latents that were made small for this.
    monkeypatch.setattr(pdx.models.deepseek_v3, "_LATENT_EPS", 1e-5)
    ids = tiny_prompt_ids[:170]
    moved = Mistake().moves(tiny_deepseek_plain, deepseek_plain_oracle, ids)
    assert moved > 50 * LOGIT_TOLERANCE
