"""load_parameters: each parameter filled once from the right file; what does not fit is named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdx.checkpoint.model import ModelConfig
from pdx.errors import CheckpointError
from pdx.kernels.ops import REFERENCE_OPS
from pdx.models.registry import CausalLM, build_model
from pdx.weights.load import load_parameters

Weights = dict[str, torch.Tensor]
HEAD = "lm_head.weight"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def weights(tiny_llama: Path) -> Weights:
    tensors: Weights = load_file(tiny_llama / "model.safetensors")
    return tensors


@pytest.fixture
def model(tiny_llama: Path) -> CausalLM:
    return empty_model(ModelConfig.load(tiny_llama))


def empty_model(config: ModelConfig) -> CausalLM:
    with torch.device("meta"):
        return build_model(config, REFERENCE_OPS)


def load(
    model: CausalLM, folder: Path, dtype: torch.dtype = torch.float32
) -> list[tuple[int, int]]:
    reports: list[tuple[int, int]] = []
    load_parameters(model, folder, dtype, lambda done, total: reports.append((done, total)))
    return reports


def test_parameters_hold_the_stored_values_in_the_wanted_dtype(
    model: CausalLM, weights: Weights, tiny_llama: Path
) -> None:
    load(model, tiny_llama)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    for name, parameter in parameters.items():
        assert parameter.dtype == torch.float32
        assert not parameter.requires_grad
        assert torch.equal(parameter, weights[name].to(torch.float32)), name


def test_weights_are_a_copy_of_the_file(model: CausalLM, weights: Weights, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights, path)
    load(model, tmp_path, torch.bfloat16)
    with path.open("r+b") as file:
        file.truncate(1000)
    assert torch.equal(dict(model.named_parameters())[HEAD], weights[HEAD])


def test_progress_rises_to_the_total(model: CausalLM, tiny_llama: Path) -> None:
    reports = load(model, tiny_llama)
    done = [report[0] for report in reports]
    assert done == sorted(done)
    assert reports[-1][0] == reports[-1][1] == sum(p.nbytes for p in model.parameters())


def test_shards_are_found_by_the_index_and_strays_ignored(
    model: CausalLM, weights: Weights, tmp_path: Path
) -> None:
    names = sorted(weights)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, tmp_path / file)
    save_file({HEAD: torch.zeros(3)}, tmp_path / "model-stray.safetensors")
    weight_map = {name: file for file, part in files.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    load(model, tmp_path, torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({HEAD: None, NORM: None}, f"missing: {NORM}, {HEAD}"),
        ({"model.layers.3.mlp.up_proj.weight": torch.zeros(1)}, "unused: model.layers.3.mlp.up"),
        ({NORM: torch.zeros(64)}, f"wrong shape: {NORM} is [64], wanted [128]"),
        ({NORM: torch.zeros(128, dtype=torch.int8)}, f"wrong type: {NORM} is I8"),
        ({NORM: torch.zeros(128).to(torch.float8_e4m3fn)}, f"wrong type: {NORM} is F8_E4M3"),
    ],
)
def test_what_does_not_fit_is_named(
    model: CausalLM,
    weights: Weights,
    tmp_path: Path,
    change: dict[str, torch.Tensor | None],
    named: str,
) -> None:
    changed = {k: v for k, v in {**weights, **change}.items() if v is not None}
    save_file(changed, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(named)):
        load(model, tmp_path)


def test_tensors_of_a_shard_are_found_where_they_are_and_not_where_the_index_says(
    model: CausalLM, weights: Weights, tmp_path: Path
) -> None:
    save_file(weights, tmp_path / "a.safetensors")
    save_file({"model.layers.9.extra": torch.zeros(1)}, tmp_path / "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {HEAD: "b.safetensors", NORM: "a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"unused: model\.layers\.9\.extra"):
        load(model, tmp_path)


def test_missing_lm_head_is_refused_where_not_tied_and_fine_where_tied(
    weights: Weights, tiny_llama: Path, tmp_path: Path
) -> None:
    fields = json.loads((tiny_llama / "config.json").read_text())
    fields["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(fields))
    del weights[HEAD]
    save_file(weights, tmp_path / "model.safetensors")
    tied = empty_model(ModelConfig.load(tmp_path))
    load(tied, tmp_path)
    hidden = torch.eye(128)[:2]
    embedding = weights["model.embed_tokens.weight"].to(torch.float32)
    assert torch.equal(tied.logits(hidden), embedding.T[:2].contiguous())


def test_stored_copies_and_rotary_buffers_are_ignored(
    weights: Weights, tiny_llama: Path, tmp_path: Path
) -> None:
    fields = json.loads((tiny_llama / "config.json").read_text())
    fields["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(fields))
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)
    weights[HEAD] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    load(empty_model(ModelConfig.load(tmp_path)), tmp_path)


def test_a_head_that_is_no_copy_is_never_left_out(
    weights: Weights, tiny_llama: Path, tmp_path: Path
) -> None:
    """Whoever builds a model asks ``with_stored_head`` first; who forgets is told by the loader."""
    fields = json.loads((tiny_llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unused: lm_head\.weight"):
        load(empty_model(ModelConfig.load(tmp_path)), tmp_path)


def test_rotary_frequencies_are_ignored_where_old_checkpoints_keep_them_only(
    model: CausalLM, weights: Weights, tmp_path: Path
) -> None:
    name = "vision.rotary_emb.inv_freq"
    save_file({**weights, name: torch.zeros(16)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"unused: {name}"):
        load(model, tmp_path)


def test_long_lists_of_problems_are_cut(model: CausalLM, tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"and 22 more.*unused: x") as caught:
        load(model, tmp_path)
    assert len(caught.value.message) < 1000


def test_damaged_file_is_named(model: CausalLM, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(model, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(
    model: CausalLM, weights: Weights, tmp_path: Path, value: float
) -> None:
    weights[NORM][5] = value
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{NORM} holds NaN or an infinity, as float32"):
        load(model, tmp_path)


def test_weights_past_the_range_of_float16_are_refused_in_it(
    weights: Weights, tiny_llama: Path, tmp_path: Path
) -> None:
    weights[NORM][5] = 1e5
    save_file(weights, tmp_path / "model.safetensors")
    load(empty_model(ModelConfig.load(tiny_llama)), tmp_path, torch.bfloat16)
    with pytest.raises(CheckpointError, match="as float16") as refused:
        load(empty_model(ModelConfig.load(tiny_llama)), tmp_path, torch.float16)
    assert "--dtype bfloat16" in str(refused.value.hint)
