"""The table of tensors that is made without torch is the one that the modules make."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from pdx.checkpoint.model import ModelConfig
from pdx.checkpoint.stored_tensors import draft_tensors, kv_scale_tensors, wanted_tensors
from pdx.kernels.ops import REFERENCE_OPS
from pdx.models.registry import build_drafts, build_model
from pdx.models.stored import stored_parts
from tests.checkpoint.test_deepseek import R1
from tests.checkpoint.test_model import load

FAMILIES = ["tiny_llama", "tiny_qwen3", "tiny_qwen3_moe", "tiny_deepseek"]


def check(config: ModelConfig, stored: frozenset[str] = frozenset()) -> None:
    with torch.device("meta"):
        model, drafts = build_model(config, REFERENCE_OPS), build_drafts(config, REFERENCE_OPS)
    for module, table in ((model, wanted_tensors), (drafts, draft_tensors)):
        parts = [part for own in stored_parts(module, stored).values() for part in own]
        assert table(config, stored) == {part.name: part.shape for part in parts}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
def test_names_and_shapes_are_those_of_the_modules(
    family: str, changes: dict[str, bool], request: pytest.FixtureRequest
) -> None:
    config = ModelConfig.load(request.getfixturevalue(family))
    if family == "tiny_deepseek" and "attention_bias" in changes:
        changes = {}  # it is refused of that family
    check(dataclasses.replace(config, **changes))


def test_biases_of_mlps(tiny_llama: Path) -> None:
    check(dataclasses.replace(ModelConfig.load(tiny_llama), mlp_bias=True, attention_bias=True))


@pytest.mark.parametrize("fused", ["gate_up_proj", "down_proj"])
def test_experts_of_all_in_one_tensor(tiny_qwen3_moe: Path, fused: str) -> None:
    config = ModelConfig.load(tiny_qwen3_moe)
    assert config.experts is not None
    names = {f"model.layers.{layer}.mlp.experts.{fused}" for layer in config.experts.layers}
    check(config, frozenset(names))
    assert names <= wanted_tensors(config, names).keys()


def test_queries_without_a_latent_and_layers_that_draft(tmp_path: Path) -> None:
    fewer = {"num_hidden_layers": 4, "n_routed_experts": 16, "q_lora_rank": None}
    config = load(tmp_path, **{**R1, **fewer})
    check(config)
    assert draft_tensors(config, ())


def test_scales_of_a_float8_cache_are_those_that_the_loader_looks_for(tiny_llama: Path) -> None:
    from pdx.weights.index import WeightIndex
    from pdx.weights.kv_scales import load_kv_scales

    config = ModelConfig.load(tiny_llama)
    with torch.device("meta"):
        model = build_model(config, REFERENCE_OPS)
    asked: set[str] = set()

    class Names(dict):  # type: ignore[type-arg]
        def __contains__(self, name: object) -> bool:
            asked.add(str(name))
            return False

    load_kv_scales(model, WeightIndex(tensors=Names()))
    assert kv_scale_tensors(config) == asked
