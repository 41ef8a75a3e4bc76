"""Rotary angles: frequencies once per model, cosines and sines once per pass for all layers."""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor, nn

from pdx.checkpoint.rope import (
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
)

__all__ = ["RotaryEmbedding", "inverse_frequencies"]


class RotaryEmbedding(nn.Module):
    """cos and sin of position * frequency. Frequencies are a buffer that no checkpoint holds."""

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(config, head_dim), persistent=False)
        scaling = config.scaling
        # Longer rotated vectors are hotter attention scores: the square of this.
        self._length = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int [T] -> cos, sin [T, D/2] float32."""
        inv_freq = self.get_buffer("inv_freq")
        angles = positions[:, None].to(inv_freq.dtype) * inv_freq
        return angles.cos() * self._length, angles.sin() * self._length


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """theta^(-2i/D), scaled; float32 [D/2] on the CPU.

    In float32 on purpose, as the published models were trained and transformers computes: at
    position 8,192 the rounding of the highest frequency is already 5e-4 of a radian.
    """
    exponents = torch.arange(0, head_dim, 2, device="cpu").to(torch.float32) / head_dim
    inv_freq = 1.0 / config.theta**exponents
    scaling = config.scaling
    match scaling:
        case None | DynamicNtkScaling():  # which changes nothing up to the length that is served
            return inv_freq
        case LinearScaling():
            return inv_freq / scaling.factor
        case Llama3Scaling():
            return _llama3(inv_freq, scaling)
        case YarnScaling():
            return _yarn(inv_freq, scaling, config.theta)
        case _:
            assert_never(scaling)


def _llama3(inv_freq: Tensor, scaling: Llama3Scaling) -> Tensor:
    # Three regimes by how often a frequency turns within the original context: at least
    # high_freq_factor times: kept; at most low_freq_factor times: divided; between: a blend, linear
    # in the number of turns.
    turns = scaling.original_len * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * inv_freq / scaling.factor + kept * inv_freq


def _yarn(inv_freq: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    # Peng et al. 2023, "YaRN", section 3.2, with the blend as its published code has it: linear in
    # the index of the frequency (not in its turns), between the indices where a frequency turns
    # beta_fast and beta_slow times within the original context.
    num_freqs = len(inv_freq)

    def index_of(turns: float) -> float:
        return num_freqs * math.log(scaling.original_len / (2 * math.pi * turns), theta)

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, 2.0 * num_freqs - 1.0)
    if low == high:
        high += 0.001
    divided = ((torch.arange(num_freqs, device="cpu") - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - divided) * inv_freq + divided * inv_freq / scaling.factor
