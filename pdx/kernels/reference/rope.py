"""Rotary positions in halves: the pair (x[i], x[i + D/2]) turns by position * frequency[i].

Source: Su et al. 2021, "RoFormer"; halves, not neighbours, because Hugging Face's Llama weights are
stored for that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.reference.accumulate import widen

__all__ = ["rope"]


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D]; cos and sin [T, D/2] of the angles, float32 or wider -> [T, H, D] as x."""
    first, second = widen(x).chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)
