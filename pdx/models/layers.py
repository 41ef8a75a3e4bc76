"""Layers that architectures share: parameters by their checkpoint names, and one op each.

Not torch.nn's own: those draw random initial values that nobody reads, which on large models takes
longer than loading.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from pdx.kernels.ops import Ops

__all__ = ["Embedding", "Linear", "RmsNorm", "SwiGluMlp"]


class Linear(nn.Module):
    """y = x weight^T + bias."""

    bias: nn.Parameter | None

    def __init__(self, in_size: int, out_size: int, *, bias: bool, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self.weight = nn.Parameter(torch.empty(out_size, in_size), requires_grad=False)
        bias_value = nn.Parameter(torch.empty(out_size), requires_grad=False) if bias else None
        self.register_parameter("bias", bias_value)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        return self._ops.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Rows of a table."""

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [T] -> [T, size]."""
        return embedding(ids, self.weight)


class RmsNorm(nn.Module):
    """RMSNorm with a weight."""

    def __init__(self, size: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self._eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        return self._ops.rms_norm(x, self.weight, self._eps)


class SwiGluMlp(nn.Module):
    """y = down(silu(gate(x)) * up(x))."""

    def __init__(self, size: int, inner_size: int, *, bias: bool, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self.gate_proj = Linear(size, inner_size, bias=bias, ops=ops)
        self.up_proj = Linear(size, inner_size, bias=bias, ops=ops)
        self.down_proj = Linear(inner_size, size, bias=bias, ops=ops)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, size] -> the same shape."""
        y: Tensor = self.down_proj(self._ops.silu_mul(self.gate_proj(x), self.up_proj(x)))
        return y
