"""The gate of a SwiGLU MLP: y = gate * sigmoid(gate) * up.

Source: Shazeer 2020, "GLU Variants Improve Transformer". Rounded to the dtype between the two
factors, as published.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.reference.accumulate import widen

__all__ = ["silu_mul"]


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [..., I] -> [..., I] in their dtype."""
    wide = widen(gate)
    return (wide * torch.sigmoid(wide)).to(gate.dtype) * up
