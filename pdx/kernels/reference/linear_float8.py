"""A linear layer whose weight is stored as float8 blocks: y = x (weight * scale)^T + bias.

Each 128 x 128 block of the weight, from its first row and column on, has one scale; the last blocks
may be partial. Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3. Inputs are
not quantized, which is more exact than published.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.reference.linear import linear

__all__ = ["BLOCK_SIZE", "dequantised_blocks", "linear_float8"]

BLOCK_SIZE = 128


def linear_float8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, I], float8 weight [O, I], float32 scale [O / 128, I / 128] rounded up, bias [O] ->
    [T, O] in x's dtype.
    """
    return linear(x, dequantised_blocks(weight, scale), bias)


def dequantised_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    """float8 [..., O, I] and its scales -> float32 of the same shape."""
    rows, columns = weight.shape[-2:]
    by_row = scale.repeat_interleave(BLOCK_SIZE, dim=-2)[..., :rows, :]
    by_value = by_row.repeat_interleave(BLOCK_SIZE, dim=-1)[..., :columns]
    return weight.to(torch.float32) * by_value
