"""Each stored tensor is used, or known to be a copy, or the error names it: from headers alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdx.checkpoint.folder import Checkpoint
from pdx.errors import CheckpointError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Weights = dict[str, torch.Tensor]


def write(source: Path, folder: Path, change: Callable[[Weights], None], **fields: Any) -> Path:
    """A copy of a one-file checkpoint with other tensors and fields."""
    weights: Weights = load_file(source / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


def _copy_of_embedding(weights: Weights) -> None:
    weights[HEAD] = weights[EMBEDDING].clone()


def _other_head(weights: Weights) -> None:
    weights[HEAD] = weights[EMBEDDING].clone()
    weights[HEAD][-1, -1] += 1


def _head_of_another_type(weights: Weights) -> None:
    weights[HEAD] = weights[EMBEDDING].float()


def test_a_copy_of_the_embedding_is_left_out(tiny_qwen3: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.read(write(tiny_qwen3, tmp_path, _copy_of_embedding))
    assert checkpoint.model.tie_word_embeddings
    assert not checkpoint.warnings


@pytest.mark.parametrize("change", [_other_head, _head_of_another_type])
def test_another_head_is_used_and_told(
    tiny_qwen3: Path, tmp_path: Path, change: Callable[[Weights], None]
) -> None:
    checkpoint = Checkpoint.read(write(tiny_qwen3, tmp_path, change))
    assert not checkpoint.model.tie_word_embeddings
    [warning] = checkpoint.warnings
    assert HEAD in warning
    assert "the stored head is used" in warning


def test_a_head_in_another_file_is_compared(tiny_qwen3: Path, tmp_path: Path) -> None:
    write(tiny_qwen3, tmp_path, lambda weights: None)
    for value, is_tied in ((0.0, True), (1.0, False)):
        weights: Weights = load_file(tiny_qwen3 / "model.safetensors")
        save_file({HEAD: weights[EMBEDDING] + value}, tmp_path / "model-head.safetensors")
        assert Checkpoint.read(tmp_path).model.tie_word_embeddings is is_tied


def test_a_head_of_another_shape_is_refused(tiny_qwen3: Path, tmp_path: Path) -> None:
    def shorter(weights: Weights) -> None:
        weights[HEAD] = weights[EMBEDDING][1:].clone()

    with pytest.raises(CheckpointError, match=r"wrong shape: lm_head\.weight"):
        Checkpoint.read(write(tiny_qwen3, tmp_path, shorter))


def test_a_missing_head_says_how_a_tied_one_is_written(tiny_qwen3: Path, tmp_path: Path) -> None:
    folder = write(tiny_qwen3, tmp_path, lambda weights: None, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight") as refused:
        Checkpoint.read(folder)
    assert '"tie_word_embeddings": true' in str(refused.value.hint)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.4.input_layernorm.weight",
        "model.layers.0.self_attn.sub_norm.weight",
        "model.layers.0.mlp.gate_proj.weight_scale",
        "model.layers.0.mlp.gate_proj.lora_A.weight",
        "vision_tower.patch_embed.weight",
        "lm_head.bias",
        "score.weight",
        "model.embed_positions.weight",
    ],
)
def test_what_the_config_says_nothing_of_is_named(
    tiny_qwen3: Path, tmp_path: Path, name: str
) -> None:
    def more(weights: Weights) -> None:
        weights[name] = torch.zeros(4)

    with pytest.raises(CheckpointError, match=f"unused: {name}"):
        Checkpoint.read(write(tiny_qwen3, tmp_path, more))


def test_scales_of_a_float8_cache_are_known(tiny_qwen3: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_scale"

    def scaled(num_values: int) -> Callable[[Weights], None]:
        return lambda weights: weights.update({name: torch.ones(num_values)})

    assert Checkpoint.read(write(tiny_qwen3, tmp_path, scaled(1)))
    with pytest.raises(CheckpointError, match=r"k_scale is \[2\]"):
        Checkpoint.read(write(tiny_qwen3, tmp_path, scaled(2)))


def test_an_adapter_beside_the_model_is_told(tiny_qwen3: Path, tmp_path: Path) -> None:
    write(tiny_qwen3, tmp_path, lambda weights: None)
    (tmp_path / "adapter_config.json").write_text("{}")
    [warning] = Checkpoint.read(tmp_path).warnings
    assert "adapters are not applied" in warning
