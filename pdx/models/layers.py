"""Layers that architectures share: parameters by their checkpoint names, and one op each.

Not torch.nn's own: those draw random initial values that nobody reads, which on large models takes
longer than loading.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from pdx.kernels.ops import Ops
from pdx.models.sharding import Shard, TpGroup, even_shard

__all__ = [
    "ColumnLinear",
    "Embedding",
    "Linear",
    "RmsNorm",
    "RowLinear",
    "SwiGluMlp",
    "stored_scales",
]


class Linear(nn.Module):
    """y = x weight^T + bias. The weight may be float8, beside the scales of its blocks."""

    #: Parameters that may stay in float8; a loader that keeps one fills in its scales.
    float8: tuple[str, ...] = ("weight",)
    bias: nn.Parameter | None
    weight_scale_inv: nn.Parameter | None

    def __init__(self, in_size: int, out_size: int, *, bias: bool, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self.weight = nn.Parameter(torch.empty(out_size, in_size), requires_grad=False)
        bias_value = nn.Parameter(torch.empty(out_size), requires_grad=False) if bias else None
        self.register_parameter("bias", bias_value)
        self.register_parameter("weight_scale_inv", None)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        return self._product(x, self.bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.weight_scale_inv is None:
            return self._ops.linear(x, self.weight, bias)
        return self._ops.linear_float8(x, self.weight, self.weight_scale_inv, bias)


class ColumnLinear(Linear):
    """A linear layer of which this rank computes some outputs: ``rows`` of the weight."""

    def __init__(self, in_size: int, rows: Shard, *, bias: bool, ops: Ops) -> None:
        super().__init__(in_size, rows.size, bias=bias, ops=ops)
        self.shards = {"weight": rows} | ({"bias": rows} if bias else {})


class RowLinear(Linear):
    """A linear layer of which this rank has some inputs: ``columns``; outputs are summed."""

    def __init__(self, columns: Shard, out_size: int, *, bias: bool, ops: Ops, tp: TpGroup) -> None:
        super().__init__(columns.size, out_size, bias=bias, ops=ops)
        self._tp = tp
        self.shards = {"weight": columns}

    def forward(self, x: Tensor) -> Tensor:
        """x [T, this rank's inputs] -> [T, out]."""
        return self._tp.sum(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's share of the sum, for a caller that sums more with it."""
        # One rank adds the bias.
        bias = self.bias if self._tp.rank == 0 else None
        return self._product(x, bias)


class Embedding(nn.Module):
    """Rows of a table, of which each rank holds some."""

    def __init__(self, num_rows: int, size: int, tp: TpGroup) -> None:
        super().__init__()
        self._tp = tp
        rows = even_shard(num_rows, tp)
        self._first = rows.start
        self.weight = nn.Parameter(torch.empty(rows.size, size), requires_grad=False)
        self.shards = {"weight": rows}

    def forward(self, ids: Tensor) -> Tensor:
        """ids int [T] -> [T, size]."""
        if self._tp.size == 1:
            return embedding(ids, self.weight)
        ours = ids - self._first
        elsewhere = (ours < 0) | (ours >= len(self.weight))
        rows = embedding(ours.masked_fill(elsewhere, 0), self.weight)
        return self._tp.sum(rows.masked_fill(elsewhere[:, None], 0))


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

    def of_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x and y [..., size] -> x + y and its norm, the same shape."""
        return self._ops.add_rms_norm(x, y, self.weight, self._eps)


class SwiGluMlp(nn.Module):
    """y = down(silu(gate(x)) * up(x))."""

    def __init__(self, size: int, inner_size: int, *, bias: bool, ops: Ops, tp: TpGroup) -> None:
        super().__init__()
        self._ops = ops
        self._tp = tp
        rows = even_shard(inner_size, tp)
        columns = even_shard(inner_size, tp, dim=1)
        self.gate_proj = ColumnLinear(size, rows, bias=bias, ops=ops)
        self.up_proj = ColumnLinear(size, rows, bias=bias, ops=ops)
        self.down_proj = RowLinear(columns, size, bias=bias, ops=ops, tp=tp)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, size] -> the same shape."""
        return self._tp.sum(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's share of the sum, for a caller that sums more with it."""
        return self.down_proj.partial(self._ops.silu_mul(self.gate_proj(x), self.up_proj(x)))


def stored_scales(kv: Tensor, kv_scales: tuple[float, float]) -> tuple[float, float]:
    """What a stored K, and a stored V, of 1 means: ``kv_scales`` where the KV memory is float8."""
    return kv_scales if kv.dtype == torch.float8_e4m3fn else (1.0, 1.0)
