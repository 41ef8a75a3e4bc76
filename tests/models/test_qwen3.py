"""Qwen3 against transformers in float32: both layouts, tied and untied heads, one file and two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdx.checkpoint.model import ModelConfig
from pdx.errors import CheckpointError
from pdx.kernels.ops import REFERENCE_OPS, Ops, ops_for
from tests.models.comparison import LENGTHS, LOGIT_TOLERANCE, altered, difference, loaded, run
from tests.oracle.transformers_oracle import Oracle


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("folder", "oracle"),
    [
        ("tiny_qwen3", "qwen3_oracle"),
        ("tiny_qwen3_v5", "qwen3_oracle"),
        ("tiny_qwen3_untied", "untied_oracle"),
        ("tiny_qwen3_untied_v5", "untied_oracle"),
    ],
)
@pytest.mark.parametrize("ops", [REFERENCE_OPS, ops_for("cpu")], ids=["reference", "cpu"])
def test_logits_equal_transformers(
    length: int,
    folder: str,
    oracle: str,
    ops: Ops,
    tiny_prompt_ids: list[int],
    request: pytest.FixtureRequest,
) -> None:
    path, judge = request.getfixturevalue(folder), request.getfixturevalue(oracle)
    assert difference(path, judge, tiny_prompt_ids[:length], ops) < LOGIT_TOLERANCE


@pytest.mark.parametrize("sizes", [[64, 64, 42], [1] * 20, [15, 1, 1, 16, 17], [33, 1, 1]])
def test_chunks_give_the_logits_of_the_whole(
    sizes: list[int], tiny_qwen3: Path, qwen3_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    ids = tiny_prompt_ids[: sum(sizes)]
    rest = iter(ids)
    chunks = [[next(rest) for _ in range(size)] for size in sizes]
    logits, _ = run(tiny_qwen3, chunks, ops_for("cpu"))
    assert float((logits - qwen3_oracle.logits(ids)).abs().max()) < LOGIT_TOLERANCE


def test_layers_are_reported_in_order_once_a_pass(
    tiny_qwen3: Path, tiny_prompt_ids: list[int]
) -> None:
    ids = tiny_prompt_ids[:20]
    _, ready = run(tiny_qwen3, [ids[:16], ids[16:]])
    assert ready == [0, 1, 2, 3, 0, 1, 2, 3]


def test_bfloat16_stays_near(
    tiny_qwen3: Path, qwen3_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    ids = tiny_prompt_ids[:170]
    logits, _ = run(tiny_qwen3, [ids], ops_for("cpu"), dtype=torch.bfloat16)
    expected = qwen3_oracle.logits(ids)
    # bfloat16 keeps 8 bits; logits are of size 10.
    assert float((logits - expected).abs().mean()) < 0.1


def test_biases_of_the_attention_are_loaded_and_added(
    tiny_qwen3: Path, tmp_path: Path, tiny_prompt_ids: list[int]
) -> None:
    folder = altered(tiny_qwen3, tmp_path / "biased", attention_bias=True)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in weights if name.endswith("_proj.weight") and "attn" in name]:
        size = weights[name].shape[0]
        bias = 0.3 * torch.randn(size, generator=generator)
        weights[name.replace("weight", "bias")] = bias.to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert difference(folder, Oracle(folder), tiny_prompt_ids[:64]) < LOGIT_TOLERANCE


def test_norm_of_the_heads_must_be_stored(tiny_qwen3: Path, tmp_path: Path) -> None:
    folder = altered(tiny_qwen3, tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.self_attn.q_norm.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.2\.self_attn\.q_norm"):
        loaded(folder)


def test_llama_refuses_norms_of_heads_as_unused(tiny_qwen3: Path, tmp_path: Path) -> None:
    changes = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    gone = dict.fromkeys(("use_sliding_window", "sliding_window", "max_window_layers"), ...)
    folder = altered(tiny_qwen3, tmp_path / "llama", **changes, **gone)
    with pytest.raises(CheckpointError, match=r"unused: model\.layers\.0\.self_attn\.k_norm"):
        loaded(folder)


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen3"])
def test_what_transformers_saves_is_read_alike(
    family: str, tmp_path: Path, tiny_prompt_ids: list[int], request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(family)
    oracle = Oracle(folder)
    oracle.save(tmp_path)
    saved, original = ModelConfig.load(tmp_path), ModelConfig.load(folder)
    assert saved.rope == original.rope
    assert saved.head_dim == original.head_dim
    assert difference(tmp_path, oracle, tiny_prompt_ids[:64]) < LOGIT_TOLERANCE


@pytest.mark.parametrize("oracle", ["qwen3_oracle", "untied_oracle"])
def test_tiny_models_can_tell_right_from_wrong(
    oracle: str, tiny_prompt_ids: list[int], request: pytest.FixtureRequest
) -> None:
    judge: Oracle = request.getfixturevalue(oracle)
    for length in LENGTHS:
        text = judge.greedy(tiny_prompt_ids[:length], 48)
        assert len(set(text.token_ids)) >= 35
        assert min(text.gaps) > 2e-3
