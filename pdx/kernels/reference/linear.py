"""A linear layer: y = x weight^T + bias, added up in at least float32."""

from __future__ import annotations

from torch import Tensor

from pdx.kernels.reference.accumulate import widen

__all__ = ["linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, I], weight [O, I], bias [O] -> [T, O] in x's dtype."""
    y = widen(x) @ widen(weight).T
    return (y if bias is None else y + widen(bias)).to(x.dtype)
