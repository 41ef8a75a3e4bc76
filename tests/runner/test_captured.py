"""A rank that captures its decode steps gives what one without graphs gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.tiny_checkpoint import LLAMA, QWEN3_MOE, TinyModel, write_hub_layout
from tests.oracle.tiny_deepseek import DEEPSEEK, DEEPSEEK_FLOAT8, write_float8
from tests.runner.captured import check_outputs

#: For a machine that is busy; 30 s of one core.
TIMEOUT_S = 290
pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)
ROOT = Path(__file__).parents[2]


def small(model: TinyModel, **shared: object) -> TinyModel:
    """Narrow, and of few layers: interpreted kernels take seconds a layer."""
    narrow = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return replace(model, shared={**model.shared, **narrow, **shared})


SMALL_LLAMA = small(LLAMA, num_hidden_layers=2, intermediate_size=32)
SMALL_MOE = replace(
    small(QWEN3_MOE, num_hidden_layers=1, mlp_only_layers=[], num_experts_per_tok=2),
    hub_only={"num_experts": 4},
)
SMALL_DEEPSEEK = small(
    DEEPSEEK,
    num_key_value_heads=2,
    num_hidden_layers=1,
    first_k_dense_replace=0,
    n_routed_experts=8,
    num_experts_per_tok=2,
    num_nextn_predict_layers=0,
)
SMALL_DRAFTING = small(DEEPSEEK, num_key_value_heads=2, num_hidden_layers=2)
SMALL_FLOAT8 = replace(DEEPSEEK_FLOAT8, shared={**DEEPSEEK_FLOAT8.shared, "num_hidden_layers": 2})
#: Of float32 sums over the same values in another order: torch's own products of latent attention
#: go by the number of rows.
NEAR = 1e-5
MODELS = ["llama", "moe", "mla"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("captured")
    for name, model in zip(MODELS, (SMALL_LLAMA, SMALL_MOE, SMALL_DEEPSEEK), strict=True):
        write_hub_layout(model, root / name)
    write_hub_layout(SMALL_DRAFTING, root / "drafts")
    write_float8(SMALL_FLOAT8, root / "float8")
    return {path.name: path for path in root.iterdir()}


def compared(*jobs: str) -> list[dict[str, Any]]:
    """Of each job both ranks' passes; in one process, in which kernels are interpreted."""
    kernels = {"PDX_KERNELS": "interpret", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.runner.captured", *jobs],
        cwd=ROOT,
        env={**os.environ, **kernels},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    told: list[dict[str, Any]] = json.loads(ended.stdout)
    return told


@pytest.fixture(scope="module")
def told(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    scripts = {"llama": "long", "moe": "short", "mla": "short"}
    jobs = {model: f"{folders[model]},{scripts[model]}" for model in MODELS}
    jobs |= {"waits": f"{folders['llama']},waits", "drafts": f"{folders['drafts']},drafts"}
    return dict(zip(jobs, compared(*jobs.values()), strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_graphs_run_steps_of_one_token_and_nothing_else(
    model: str, told: dict[str, dict[str, Any]]
) -> None:
    replayed, expected = told[model]["sizes"]
    assert replayed == expected


@pytest.mark.parametrize("model", MODELS)
def test_the_word_rises_with_each_layer_of_a_replay(
    model: str, told: dict[str, dict[str, Any]]
) -> None:
    found, wanted = told[model]["words"]
    assert found == wanted
    assert len(found) >= 3 and all(found)


@pytest.mark.parametrize("model", MODELS)
def test_tokens_and_kv_memory_are_those_without_graphs(
    model: str, told: dict[str, dict[str, Any]]
) -> None:
    check_outputs(*told[model]["outputs"], tolerance=NEAR if model == "mla" else 0.0)
    assert told[model]["differing_kv_bytes"] == 0


@pytest.mark.parametrize(
    ("cause", "log"),
    [
        (
            "waits",
            ["decode steps run without CUDA graphs: item in a captured step"],
        ),
        ("drafts", []),
    ],
)
def test_a_rank_whose_steps_no_graph_holds_runs_without(
    cause: str, log: list[str], told: dict[str, dict[str, Any]]
) -> None:
    """A model that waits for the device says so once; one that drafts has two tokens a step."""
    assert told[cause] == {
        "is_none": True,
        "log": log,
        "word": 0,
        "kv_is_untouched": True,
        "num_tokens": 1,
    }


@pytest.mark.slow
def test_float8_steps_are_captured_too(folders: dict[str, Path]) -> None:
    """KV memory of both kinds, and weights."""
    jobs = [f"{folders[model]},short,float8" for model in ("llama", "mla")]
    for each in compared(*jobs, f"{folders['float8']},short"):
        assert each["sizes"][0] == each["sizes"][1]
        check_outputs(*each["outputs"], tolerance=1e-3)
