"""Every rope scaling on both families, from one config.json that transformers reads as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.comparison import LENGTHS, LOGIT_TOLERANCE, altered, difference
from tests.oracle.transformers_oracle import Oracle

Fields = dict[str, Any]

YARN: Fields = {"factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS: dict[str, Fields] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, old spelling": {"type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn, old spelling": {"type": "yarn", **YARN},
    "yarn, both spellings": {"type": "yarn", "rope_type": "yarn", **YARN},
    "yarn, attention factor given": {"rope_type": "yarn", **YARN, "attention_factor": 1.3},
    "yarn, betas": {"rope_type": "yarn", **YARN, "beta_fast": 8, "beta_slow": 2},
    "yarn, not truncated": {"rope_type": "yarn", **YARN, "truncate": False},
    "yarn, one mscale": {"rope_type": "yarn", **YARN, "mscale": 0.707},
    "yarn, two mscales": {"rope_type": "yarn", **YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, equal mscales": {"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    # The original context is so short that every frequency turns less than beta_fast times.
    "yarn, short original": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 16,
    },
}


def with_scaling(folder: Path, copy: Path, layout: str, scaling: Fields, theta: float) -> Path:
    """The checkpoint with its rope fields replaced, in either layout."""
    if layout == "hub":
        fields: Fields = {"rope_scaling": scaling, "rope_theta": theta, "rope_parameters": ...}
    else:
        fields = {
            "rope_parameters": {**scaling, "rope_theta": theta},
            "rope_theta": ...,
            "rope_scaling": ...,
        }
    return altered(folder, copy, **fields)


@pytest.mark.parametrize("layout", ["hub", "v5"])
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("family", "theta"), [("tiny_qwen3", 1e6), ("tiny_llama", 1e4)])
def test_logits_equal_transformers(
    family: str,
    theta: float,
    name: str,
    layout: str,
    tmp_path: Path,
    tiny_prompt_ids: list[int],
    request: pytest.FixtureRequest,
) -> None:
    source: Path = request.getfixturevalue(family)
    folder = with_scaling(source, tmp_path / "scaled", layout, SCALINGS[name], theta)
    oracle = Oracle(folder)
    for length in (LENGTHS[1], LENGTHS[-1]):  # far below the original context, and past it
        assert difference(folder, oracle, tiny_prompt_ids[:length]) < LOGIT_TOLERANCE


@pytest.mark.parametrize("name", ["dynamic", "yarn"])
def test_logits_equal_transformers_at_the_model_limit(
    name: str, tiny_qwen3: Path, tmp_path: Path, tiny_prompt_ids: list[int]
) -> None:
    folder = with_scaling(tiny_qwen3, tmp_path / "scaled", "hub", SCALINGS[name], 1e6)
    ids = (tiny_prompt_ids * 3)[:512]
    assert difference(folder, Oracle(folder), ids) < LOGIT_TOLERANCE
