"""parse_rope: every spelling of every scaling is read, the rest refused by name and value."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from pdx.checkpoint.model_fields import Fields
from pdx.checkpoint.rope import (
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
    parse_rope,
)
from pdx.errors import CheckpointError

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


def parse(fields: dict[str, Any]) -> RopeConfig:
    """Parse, and insist that nothing is left."""
    rest = Fields(Path("config.json"), fields)
    rope = parse_rope(rest)
    rest.refuse_rest()
    return rope


def yarn(**changes: Any) -> YarnScaling:
    parsed = parse({"rope_scaling": {"rope_type": "yarn", **YARN, **changes}}).scaling
    assert isinstance(parsed, YarnScaling)
    return parsed


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, RopeConfig(theta=1e4, scaling=None)),
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5, scaling=None)),
        ({"rope_theta": 1000000}, RopeConfig(theta=1e6, scaling=None)),
        ({"rope_scaling": None, "rope_theta": 7e4}, RopeConfig(theta=7e4, scaling=None)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(theta=1e4, scaling=LinearScaling(factor=2.0)),
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
            RopeConfig(theta=1e5, scaling=None),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "type": "linear", "factor": 4.0}},
            RopeConfig(theta=1e4, scaling=LinearScaling(factor=4.0)),
        ),
        (
            {"rope_parameters": {"factor": 4.0, "rope_type": "linear"}, "rope_theta": 9e4},
            RopeConfig(theta=9e4, scaling=LinearScaling(factor=4.0)),
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            RopeConfig(theta=1e4, scaling=DynamicNtkScaling(factor=2.0)),
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5},
            RopeConfig(
                theta=5e5,
                scaling=Llama3Scaling(
                    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_len=64
                ),
            ),
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4},
            },
            RopeConfig(theta=3e4, scaling=LinearScaling(factor=2.0)),
        ),
    ],
)
def test_read_in_every_spelling(fields: dict[str, Any], expected: RopeConfig) -> None:
    assert parse(fields) == expected


def test_yarn_has_the_published_defaults() -> None:
    assert yarn() == YarnScaling(
        factor=4.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=True,
        attention_factor=0.1 * math.log(4.0) + 1.0,
        original_len=32768,
    )
    assert yarn(beta_fast=16, beta_slow=2, truncate=False) == YarnScaling(
        factor=4.0,
        beta_fast=16.0,
        beta_slow=2.0,
        truncate=False,
        attention_factor=0.1 * math.log(4.0) + 1.0,
        original_len=32768,
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attention_factor": 1.5}, 1.5),
        ({"attention_factor": 1.5, "mscale": 0.5, "mscale_all_dim": 1.0}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.5, "mscale_all_dim": 1.0, "factor": math.e}, 1.05 / 1.1),
        ({"mscale": 0.5, "factor": math.e}, 1.1),
        ({"mscale": 0.5, "mscale_all_dim": 0, "factor": math.e}, 1.1),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_attention_factor(changes: dict[str, Any], expected: float) -> None:
    assert yarn(**changes).attention_factor == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_theta": 1.0}, "rope_theta = 1.0"),
        ({"rope_theta": "1e6"}, 'rope_theta = "1e6"'),
        ({"rope_interleaved": True}, "rope_interleaved = true"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor = 0.25"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, 'rope_type = "longrope"'),
        ({"rope_scaling": {"type": "mrope"}}, 'rope_type = "mrope"'),
        ({"rope_scaling": {"factor": 4.0}}, "factor = 4.0"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor = 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}}, "beta = 1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2, "alpha": 1000}}, "alpha = 1000"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'original_max_position_embed"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": 1}}, "beta_fast = 1"),
        ({"rope_scaling": {"type": "yarn", **YARN, "attention_factor": -1}}, "attention_factor"),
        ({"rope_scaling": {"type": "yarn", **YARN, "extrapolation_factor": 1}}, "extrapolation_f"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention = "),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"},
            },
            "rope_scaling unlike rope_parameters",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name_and_value(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(named)):
        parse(fields)
