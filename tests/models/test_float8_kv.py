"""A KV cache in float8: what it costs in exactness, that kernels agree with it, who is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdx.checkpoint.model import ModelConfig
from pdx.errors import CheckpointError
from pdx.kernels.mla_record import record_bytes
from pdx.kv.geometry import kv_layout
from pdx.request.request import SamplingParams
from tests.models.comparison import altered, loaded, run
from tests.runner.rank_process import RankProcess, rank_config

#: Of the norm of all logits. Float8 rounds by up to 1/16 of a value, bfloat16 by 1/256: 16 times as
#: much, over the roundings of a few layers.
TOLERANCE = 0.2
MODELS = ["tiny_llama", "tiny_qwen3", "tiny_deepseek"]


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_near_those_of_an_exact_cache(
    model: str, tiny_prompt_ids: list[int], request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(model)
    ids = tiny_prompt_ids[:70]
    chunks = [ids[:40], ids[40:69], ids[69:]]
    exact, _ = run(folder, chunks)
    rounded, _ = run(folder, chunks, float8_kv=True)
    assert 1e-4 < distance(rounded, exact) < TOLERANCE


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "model", [pytest.param("tiny_llama", marks=pytest.mark.slow), "tiny_deepseek"]
)
def test_an_interpreted_rank_computes_what_the_reference_does(
    model: str,
    tiny_prompt_ids: list[int],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder: Path = request.getfixturevalue(model)
    monkeypatch.setenv("PDX_KERNELS", "interpret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    prompt = tiny_prompt_ids[:21]
    sampling = SamplingParams(max_tokens=9, temperature=0.0, logprobs=8)
    with RankProcess(rank_config(folder, kv_dtype="float8")) as rank:
        ready = rank.wait_ready()
        first, second = rank.generate(1, prompt, 2, [5, 2], sampling)
    layout = kv_layout(ModelConfig.load(folder), 16, 64, "float8")
    assert ready.kv_bytes == layout.total_bytes
    ids = [*prompt, first.token_id]
    logits, _ = run(folder, [ids[:20], *([i] for i in ids[20:])], float8_kv=True)
    expected = torch.log_softmax(logits, dim=-1)
    for token, row in ((first, 20), (second, 21)):
        for token_id, logprob in token.top:
            # Kernels keep queries and weights of the scores in float16 beside a float8 cache.
            assert logprob == pytest.approx(float(expected[row, token_id]), abs=0.05)


def test_a_latents_record_is_counted_as_kernels_lay_it_out(tiny_deepseek: Path) -> None:
    mla = ModelConfig.load(tiny_deepseek).mla
    assert mla is not None
    assert mla.float8_record_bytes == record_bytes(mla.latent_dim, mla.rope_dim)
    assert record_bytes(512, 64) == 656


def with_scales(folder: Path, copy: Path, *scales: float) -> Path:
    altered(folder, copy)
    weights = load_file(copy / "model.safetensors")
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        weights[f"model.layers.0.self_attn.{name}"] = torch.tensor(scale)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_a_checkpoints_scales_are_used(
    tiny_llama: Path, tmp_path: Path, tiny_prompt_ids: list[int]
) -> None:
    """As powers of two they move the exponents alone, so that the numbers stay."""
    scaled = with_scales(tiny_llama, tmp_path / "copy", 0.25, 4.0)
    model = loaded(scaled)
    assert model.model.layers[0].self_attn.kv_scales == (0.25, 4.0)
    assert model.model.layers[1].self_attn.kv_scales == (1.0, 1.0)
    ids = tiny_prompt_ids[:20]
    plain, _ = run(tiny_llama, [ids], float8_kv=True)
    moved, _ = run(scaled, [ids], float8_kv=True)
    assert distance(moved, plain) < TOLERANCE
    assert torch.equal(run(scaled, [ids])[0], run(tiny_llama, [ids])[0]), "not of other caches"


def test_scales_that_are_none_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"v_scale is \[0\.0\], not one positive number"):
        loaded(with_scales(tiny_llama, tmp_path / "copy", 1.0, 0.0))


def test_a_cpus_own_ops_refuse_it(tiny_llama: Path) -> None:
    with RankProcess(rank_config(tiny_llama, kv_dtype="float8")) as rank:
        failure = rank.expect_failure()
    assert failure.kind == "ConfigError"
    assert "float8 is not served on a CPU" in failure.message
