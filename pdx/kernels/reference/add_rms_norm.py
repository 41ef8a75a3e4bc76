"""RMSNorm of a residual stream to which a layer's output is added: s = x + y, RMSNorm(s).

The sum is rounded to its dtype before it is normed, as in the layers' published code.
"""

from __future__ import annotations

from torch import Tensor

from pdx.kernels.reference.rms_norm import rms_norm

__all__ = ["add_rms_norm"]


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and y [..., H], weight [H] -> the sum and its norm, [..., H] each, in x's dtype."""
    total = x + y
    return total, rms_norm(total, weight, eps)
