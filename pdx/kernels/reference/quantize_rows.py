"""Activations as float8: values x / scale, scale = max |x| / 448 of each 128 values of a row.

A block of zeros has the scale 1. Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section
3.3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["quantize_rows"]

_BLOCK, _LARGEST = 128, 448.0


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> float8_e4m3fn [T, K], float32 [T, K / 128 rounded up]."""
    num_rows, size = x.shape
    blocks = pad(x.float(), (0, -size % _BLOCK)).view(num_rows, -1, _BLOCK)
    largest = blocks.abs().amax(-1)
    scales = torch.where(largest == 0, 1.0, largest / _LARGEST)
    values = (blocks / scales[..., None]).flatten(1)[:, :size]
    return values.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales
