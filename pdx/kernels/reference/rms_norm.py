"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, over the last axis.

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization". Rounded to x's dtype before
the weight, as Llama's published code does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.reference.accumulate import widen

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H], weight [H] -> [..., H] in x's dtype."""
    wide = widen(x)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
