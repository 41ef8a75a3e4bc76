"""Rotary positions: pair i turns by position * frequency[i].

Source: Su et al. 2021, "RoFormer". Pairs are halves (x[i], x[i + D/2]), as Hugging Face's Llama
weights are stored for, or neighbours (x[2i], x[2i + 1]), as DeepSeek's are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.reference.accumulate import widen

__all__ = ["rope", "rope_interleaved"]


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D]; cos and sin [T, D/2] of the angles, float32 or wider -> [T, H, D] as x."""
    first, second = widen(x).chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same with neighbours as pairs, which stay neighbours."""
    halves = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
    return torch.stack(rope(halves, cos, sin).chunk(2, dim=-1), dim=-1).flatten(-2)
