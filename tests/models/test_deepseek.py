"""DeepSeek-V3 against transformers in float32: both layouts, with and without a query latent, and
weights in float8 blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdx.checkpoint.model import ModelConfig
from pdx.errors import CheckpointError
from pdx.kernels.batch import ForwardBatch
from pdx.kernels.ops import REFERENCE_OPS, Ops, ops_for
from tests.models.comparison import (
    LENGTHS,
    LOGIT_TOLERANCE,
    PAGE_SIZE,
    altered,
    difference,
    empty_kv,
    loaded,
    run,
)
from tests.oracle.transformers_oracle import Oracle

MODELS = {
    "tiny_deepseek": "deepseek_oracle",
    "tiny_deepseek_v5": "deepseek_oracle",
    "tiny_deepseek_plain": "deepseek_plain_oracle",
    "tiny_deepseek_float8": "deepseek_float8_oracle",
}
YARN = {"type": "yarn", "factor": 8, "original_max_position_embeddings": 64}
all_models = pytest.mark.parametrize("folder", MODELS)


@pytest.mark.parametrize("length", LENGTHS)
@all_models
@pytest.mark.parametrize("ops", [REFERENCE_OPS, ops_for("cpu")], ids=["reference", "cpu"])
def test_logits_equal_transformers(
    length: int, folder: str, ops: Ops, tiny_prompt_ids: list[int], request: pytest.FixtureRequest
) -> None:
    path, oracle = request.getfixturevalue(folder), request.getfixturevalue(MODELS[folder])
    assert difference(path, oracle, tiny_prompt_ids[:length], ops) < LOGIT_TOLERANCE


@pytest.mark.parametrize("sizes", [[64, 42], [1] * 20, [33, 1, 1, 16]])
@all_models
@pytest.mark.parametrize("ops", [REFERENCE_OPS, ops_for("cpu")], ids=["reference", "cpu"])
def test_chunks_and_steps_give_the_logits_of_the_whole(
    sizes: list[int],
    folder: str,
    ops: Ops,
    tiny_prompt_ids: list[int],
    request: pytest.FixtureRequest,
) -> None:
    """Steps attend through the latents, chunks through each head's keys and values."""
    path, oracle = request.getfixturevalue(folder), request.getfixturevalue(MODELS[folder])
    ids = tiny_prompt_ids[: sum(sizes)]
    rest = iter(ids)
    chunks = [[next(rest) for _ in range(size)] for size in sizes]
    logits, _ = run(path, chunks, ops)
    assert float((logits - oracle.logits(ids)).abs().max()) < LOGIT_TOLERANCE


def test_requests_of_one_pass_do_not_mix(
    tiny_deepseek: Path, deepseek_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    """Two steps, a chunk and a whole prompt together, each with its own pages."""
    config, model = ModelConfig.load(tiny_deepseek), loaded(tiny_deepseek, ops_for("cpu"))
    kv = empty_kv(config, 12)
    #: Tokens before this pass and in it.
    shapes = [(20, 1), (3, 1), (17, 9), (0, 5)]
    prompts = [tiny_prompt_ids[i : i + before + now] for i, (before, now) in enumerate(shapes)]
    tables = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(4)]

    def one_pass(spans: list[tuple[int, int]]) -> torch.Tensor:
        table = zip(spans, prompts, tables, strict=True)
        rows = [(b, n, pages, ids) for (b, n), ids, pages in table if n]
        token_ids = [token for b, n, _, ids in rows for token in ids[b : b + n]]
        positions = [place for b, n, _, _ in rows for place in range(b, b + n)]
        batch = ForwardBatch.build(PAGE_SIZE, [(b, n, pages) for b, n, pages, _ in rows])
        with torch.inference_mode():
            hidden = model(
                torch.tensor(token_ids), torch.tensor(positions), kv, batch, lambda layer: None
            )
            return model.logits(hidden)

    one_pass([(0, before) for before, _ in shapes])
    logits = one_pass(shapes)
    begin = 0
    for (before, now), ids in zip(shapes, prompts, strict=True):
        expected = deepseek_oracle.logits(ids)[before:]
        error = (logits[begin : begin + now] - expected).abs().max()
        assert float(error) < LOGIT_TOLERANCE
        begin += now


@pytest.mark.parametrize(
    "changes",
    [
        {"n_group": 2, "topk_group": 1},
        {"n_group": 8, "topk_group": 8},
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 8},
        {"rope_interleave": False},
        {"rope_scaling": None},
        {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}},
        {"rope_scaling": YARN},
        {"rope_scaling": {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ],
    ids=str,
)
def test_other_numbers_equal_transformers(
    changes: dict[str, Any], tiny_deepseek: Path, tmp_path: Path, tiny_prompt_ids: list[int]
) -> None:
    folder = altered(tiny_deepseek, tmp_path / "other", **changes)
    ids, oracle = tiny_prompt_ids[:170], Oracle(folder)
    assert difference(folder, oracle, ids, ops_for("cpu")) < LOGIT_TOLERANCE


@all_models
def test_pages_hold_a_latent_and_a_rotated_key_for_all_heads(
    folder: str, request: pytest.FixtureRequest
) -> None:
    config = ModelConfig.load(request.getfixturevalue(folder))
    assert empty_kv(config, 2).shape == (config.num_layers, 2, 1, 1, PAGE_SIZE, 64 + 32)


def without(folder: Path, copy: Path, prefix: str) -> Path:
    """A copy that lacks the tensors with a prefix."""
    altered(folder, copy)
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not name.startswith(prefix)}
    assert len(kept) < len(weights)
    save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_layer_that_drafts_may_be_missing_though_promised(
    tiny_deepseek: Path, deepseek_oracle: Oracle, tmp_path: Path, tiny_prompt_ids: list[int]
) -> None:
    folder = without(tiny_deepseek, tmp_path / "copy", "model.layers.4.")
    assert difference(folder, deepseek_oracle, tiny_prompt_ids[:33]) < LOGIT_TOLERANCE


def test_part_of_the_layer_that_drafts_may_not_be_missing(
    tiny_deepseek: Path, tmp_path: Path
) -> None:
    folder = without(tiny_deepseek, tmp_path / "copy", "model.layers.4.enorm")
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.4\.enorm\.weight"):
        loaded(folder)


def test_layer_that_drafts_is_unused_where_it_is_not_promised(
    tiny_deepseek: Path, tmp_path: Path
) -> None:
    folder = altered(tiny_deepseek, tmp_path / "copy", num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"unused: model\.layers\.4\."):
        loaded(folder)


def test_what_transformers_saves_is_read_alike(
    tiny_deepseek: Path, deepseek_oracle: Oracle, tmp_path: Path, tiny_prompt_ids: list[int]
) -> None:
    deepseek_oracle.save(tmp_path)
    saved, original = ModelConfig.load(tmp_path), ModelConfig.load(tiny_deepseek)
    assert (saved.mla, saved.experts, saved.rope) == (original.mla, original.experts, original.rope)
    assert difference(tmp_path, deepseek_oracle, tiny_prompt_ids[:64]) < LOGIT_TOLERANCE


def test_bfloat16_keeps_the_router_in_float32_and_stays_near(
    tiny_deepseek: Path, deepseek_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    ids = tiny_prompt_ids[:170]
    model = loaded(tiny_deepseek, dtype=torch.bfloat16)
    dtypes = {name: p.dtype for name, p in model.named_parameters() if ".mlp.gate." in name}
    assert dtypes
    assert set(dtypes.values()) == {torch.float32}
    logits, _ = run(tiny_deepseek, [ids[:-1], ids[-1:]], ops_for("cpu"), dtype=torch.bfloat16)
    assert float((logits - deepseek_oracle.logits(ids)).abs().mean()) < 0.2


@pytest.mark.parametrize("oracle", sorted(set(MODELS.values())))
def test_the_tiny_models_can_tell_right_from_wrong(
    oracle: str, tiny_prompt_ids: list[int], request: pytest.FixtureRequest
) -> None:
    judge: Oracle = request.getfixturevalue(oracle)
    for length in LENGTHS:
        text = judge.greedy(tiny_prompt_ids[:length], 48)
        assert len(set(text.token_ids)) >= 35
        assert min(text.gaps) > 2e-3
