"""How a checkpoint turns positions into rotations: theta and the scalings of it. No torch.

Read from ``rope_theta`` and ``rope_scaling`` (the hub's layout, where the kind may be spelled
``type``) or from ``rope_parameters`` (transformers 5). The formulas are in ``pdx.models.rope``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from pdx.checkpoint.model_fields import Fields

__all__ = [
    "DynamicNtkScaling",
    "LinearScaling",
    "Llama3Scaling",
    "RopeConfig",
    "RopeScaling",
    "YarnScaling",
    "parse_rope",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions are divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicNtkScaling:
    """Theta grows with the length of the text once that is past ``max_position_embeddings``.

    We serve no longer texts (keys cached under the theta of a shorter text would be wrong after
    it), and up to there the rotations are those without scaling.
    """

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies are divided by ``factor``, high ones kept, others blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    #: Context that the model was first trained with, tokens.
    original_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Frequencies that turn less than ``beta_slow`` times within the original context are divided
    by ``factor``, those that turn more than ``beta_fast`` times kept, others blended; all rotated
    vectors are ``attention_factor`` times as long. The same at every length of text.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    #: Whether the blend begins and ends at whole dimensions.
    truncate: bool
    attention_factor: float
    #: Latent attention also scales its scores by this; 0: it does not.
    mscale_all_dim: float = 0.0
    #: Context that the model was first trained with, tokens.
    original_len: int


RopeScaling: TypeAlias = LinearScaling | DynamicNtkScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding over the whole head, in halves."""

    theta: float
    #: None: unscaled.
    scaling: RopeScaling | None


def parse_rope(fields: Fields) -> RopeConfig:
    """Take the rope fields of a config.json.

    Raises:
        CheckpointError: a kind, a number or a field is not served, or the two layouts are both
            there and disagree; the field is named.
    """
    fields.require("partial_rotary_factor", 1, 1.0)
    fields.require("rope_interleaved", False)
    theta = fields.number("rope_theta", 10000.0)
    old = fields.take("rope_scaling", dict, {})
    new = fields.take("rope_parameters", dict, {})
    if not new:
        return _parse(Fields(fields.path, old), theta)
    rope = _parse(Fields(fields.path, new), theta)
    if old and _parse(Fields(fields.path, old), theta).scaling != rope.scaling:
        raise fields.refused("rope_scaling unlike rope_parameters", old)
    return rope


def _parse(rope: Fields, theta: float) -> RopeConfig:
    theta = rope.number("rope_theta", theta)
    if theta <= 1.0:  # frequencies are to fall from pair to pair
        raise rope.refused("rope_theta", theta)
    rope.require("partial_rotary_factor", 1, 1.0)
    kind = rope.take("rope_type", str, None)
    # The older spelling, which may stay beside the newer one.
    old_kind = rope.take("type", str, None)
    kind = kind or old_kind or "default"
    if kind not in _SCALINGS:
        raise rope.refused("rope_type", kind)
    scaling = _SCALINGS[kind](rope)
    rope.refuse_rest()
    return RopeConfig(theta=theta, scaling=scaling)


def _default(rope: Fields) -> None:
    return None


def _linear(rope: Fields) -> LinearScaling:
    return LinearScaling(factor=_factor(rope))


def _dynamic(rope: Fields) -> DynamicNtkScaling:
    return DynamicNtkScaling(factor=_factor(rope))


def _llama3(rope: Fields) -> Llama3Scaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.refused("high_freq_factor", high)
    return Llama3Scaling(
        factor=_factor(rope),
        low_freq_factor=low,
        high_freq_factor=high,
        original_len=rope.size("original_max_position_embeddings"),
    )


def _yarn(rope: Fields) -> YarnScaling:
    factor = _factor(rope)
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if fast <= slow:
        raise rope.refused("beta_fast", fast)
    scale = rope.number("mscale", 0, may_be_zero=True)
    scale_all = rope.number("mscale_all_dim", 0, may_be_zero=True)
    return YarnScaling(
        factor=factor,
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.take("truncate", bool, True),
        attention_factor=rope.number(
            "attention_factor", _attention_factor(factor, scale, scale_all)
        ),
        mscale_all_dim=scale_all,
        original_len=rope.size("original_max_position_embeddings"),
    )


def _attention_factor(factor: float, scale: float, scale_all: float) -> float:
    """0.1 ln f + 1, or the ratio of DeepSeek's two weightings of it, where both are given."""
    log = 0.1 * math.log(factor)
    if scale and scale_all:
        return (scale * log + 1.0) / (scale_all * log + 1.0)
    return log + 1.0


def _factor(rope: Fields) -> float:
    factor = rope.number("factor")
    if factor < 1.0:  # a longer context is what all scalings are for
        raise rope.refused("factor", factor)
    return factor


_SCALINGS: dict[str, Callable[[Fields], RopeScaling | None]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
