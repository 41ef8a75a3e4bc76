"""Qwen3-MoE against transformers in float32: both layouts, experts apart and in one tensor."""

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
@pytest.mark.parametrize("folder", ["tiny_qwen3_moe", "tiny_qwen3_moe_v5"])
@pytest.mark.parametrize("ops", [REFERENCE_OPS, ops_for("cpu")], ids=["reference", "cpu"])
def test_logits_equal_transformers(
    length: int,
    folder: str,
    ops: Ops,
    qwen3_moe_oracle: Oracle,
    tiny_prompt_ids: list[int],
    request: pytest.FixtureRequest,
) -> None:
    path: Path = request.getfixturevalue(folder)
    assert difference(path, qwen3_moe_oracle, tiny_prompt_ids[:length], ops) < LOGIT_TOLERANCE


@pytest.mark.parametrize("sizes", [[64, 42], [1] * 20, [33, 1, 1]])
def test_chunks_give_the_logits_of_the_whole(
    sizes: list[int], tiny_qwen3_moe: Path, qwen3_moe_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    ids = tiny_prompt_ids[: sum(sizes)]
    rest = iter(ids)
    chunks = [[next(rest) for _ in range(size)] for size in sizes]
    logits, _ = run(tiny_qwen3_moe, chunks, ops_for("cpu"))
    assert float((logits - qwen3_moe_oracle.logits(ids)).abs().max()) < LOGIT_TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": False},
        {"norm_topk_prob": ...},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 16},
    ],
    ids=str,
)
def test_other_routings_equal_transformers(
    changes: dict[str, object], tiny_qwen3_moe: Path, tmp_path: Path, tiny_prompt_ids: list[int]
) -> None:
    folder = altered(tiny_qwen3_moe, tmp_path / "other", **changes)
    ids, oracle = tiny_prompt_ids[:33], Oracle(folder)
    assert difference(folder, oracle, ids, ops_for("cpu")) < LOGIT_TOLERANCE


def test_sparse_step_says_which_layers_are_sparse_as_in_transformers(
    tiny_qwen3_moe: Path, tmp_path: Path, tiny_prompt_ids: list[int]
) -> None:
    """Of four layers the second is dense in the files, so only it and one more can be."""
    folder = altered(tiny_qwen3_moe, tmp_path / "step", decoder_sparse_step=2, mlp_only_layers=[])
    experts = ModelConfig.load(folder).experts
    assert experts is not None
    assert experts.layers == {1, 3}
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.0\.mlp\.gate_proj\.weight"):
        loaded(folder)


def test_experts_in_one_tensor_are_loaded_as_those_apart(
    tiny_qwen3_moe: Path, qwen3_moe_oracle: Oracle, tmp_path: Path, tiny_prompt_ids: list[int]
) -> None:
    folder = altered(tiny_qwen3_moe, tmp_path / "fused")
    fuse_experts(folder)
    ids = tiny_prompt_ids[:33]
    assert difference(folder, qwen3_moe_oracle, ids, ops_for("cpu")) < LOGIT_TOLERANCE


def fuse_experts(folder: Path) -> None:
    """Rewrite a folder's weights: one file, of each layer's experts two tensors."""
    weights = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        weights |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    for layer in (0, 2, 3):
        experts = f"model.layers.{layer}.mlp.experts"
        parts = [
            [weights.pop(f"{experts}.{expert}.{name}_proj.weight") for expert in range(16)]
            for name in ("gate", "up", "down")
        ]
        gate, up, down = (torch.stack(part) for part in parts)
        weights[f"{experts}.gate_up_proj"] = torch.cat([gate, up], 1)
        weights[f"{experts}.down_proj"] = down
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_lost_expert_is_named(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    folder = altered(tiny_qwen3_moe, tmp_path / "copy")
    name = "model.layers.2.mlp.experts.7.up_proj.weight"
    for path in folder.glob("model-*.safetensors"):
        weights = load_file(path)
        weights.pop(name, None)
        save_file(weights, path)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        loaded(folder)


def test_what_transformers_saves_is_read_alike(
    tiny_qwen3_moe: Path, qwen3_moe_oracle: Oracle, tmp_path: Path, tiny_prompt_ids: list[int]
) -> None:
    qwen3_moe_oracle.save(tmp_path)
    assert ModelConfig.load(tmp_path).experts == ModelConfig.load(tiny_qwen3_moe).experts
    assert difference(tmp_path, qwen3_moe_oracle, tiny_prompt_ids[:64]) < LOGIT_TOLERANCE


def test_bfloat16_stays_near(
    tiny_qwen3_moe: Path, qwen3_moe_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    ids = tiny_prompt_ids[:170]
    logits, _ = run(tiny_qwen3_moe, [ids], ops_for("cpu"), dtype=torch.bfloat16)
    # 8 bits of logits of size 10, and now and then another expert.
    assert float((logits - qwen3_moe_oracle.logits(ids)).abs().mean()) < 0.2


def test_the_tiny_model_can_tell_right_from_wrong(
    qwen3_moe_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    for length in LENGTHS:
        text = qwen3_moe_oracle.greedy(tiny_prompt_ids[:length], 48)
        assert len(set(text.token_ids)) >= 35
        assert min(text.gaps) > 2e-3
