"""Sizes of models: what a start, --check and inspect say beforehand is what the kernels do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runner.random_sizes import TOLERANCE, write

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PDX_KERNELS": "interpret", "OMP_NUM_THREADS": "1"}
#: A checkpoint whose latents' quarters are no power of 2.
ODD_LATENTS: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "q_lora_rank": None,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def judge(seed: int, count: int, folder: Path) -> None:
    """Three answers are one, and what they promise the kernels keep."""
    command = [sys.executable, "-m", "tests.runner.random_sizes", str(seed), str(count)]
    result = subprocess.run(
        [*command, str(folder / "models")],
        cwd=ROOT,
        env={**ENV, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    models = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(models) == count
    for model in models:
        refused = model["start"] is not None
        assert model["inspect"] == model["start"], model
        assert model["exit codes"] == [refused, refused], model
        assert not refused or model["start"] in model["check"], model
        assert "broke" not in model, model
        assert refused or model["difference"] < TOLERANCE, model
    assert any(model["start"] is None for model in models)


@pytest.mark.timeout(180)
def test_random_sizes(tmp_path: Path) -> None:
    judge(1, 8, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [2, 3])
def test_many_random_sizes(seed: int, tmp_path: Path) -> None:
    judge(seed, 150, tmp_path)


def test_a_start_refuses_before_it_starts_and_a_cpu_takes_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, ODD_LATENTS, seed=0)

    def pdx(*words: str, kernels: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pdx", *words]
        env = {**ENV, "PDX_KERNELS": kernels}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    generate = ("generate", str(folder), "--token-ids", "1,2", "-n", "1")
    refused = pdx(*generate, kernels="interpret")
    assert refused.returncode == 1
    assert "kv_lora_rank = 48 (a power of 2 from 16 to 512 is wanted)" in refused.stderr
    assert "hint: use --device cpu" in refused.stderr
    inspected = pdx("inspect", "model", str(folder), "--json", kernels="interpret")
    assert inspected.returncode == 1
    assert json.loads(inspected.stdout)["refusal"] in refused.stderr

    assert pdx(*generate, kernels="").returncode == 0
    inspected = pdx("inspect", "model", str(folder), kernels="")
    assert inspected.returncode == 0
    assert "not on a GPU" in inspected.stdout
    on_gpu = pdx("inspect", "model", str(folder), "--device", "cuda", kernels="")
    assert on_gpu.returncode == 1
    assert "kv_lora_rank = 48" in on_gpu.stderr
