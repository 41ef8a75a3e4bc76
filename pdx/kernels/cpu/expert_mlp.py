"""The MLPs of a sparse layer on a CPU: each chosen expert's weights are read once a pass.

Specification: ``kernels/reference/expert_mlp``, which float8 weights take. The rows are sorted by
expert once, so that no expert looks for its own among all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.cpu.linear import linear
from pdx.kernels.cpu.silu_mul import silu_mul
from pdx.kernels.reference.expert_mlp import expert_mlp as reference

__all__ = ["expert_mlp"]


def expert_mlp(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> Tensor:
    """x [T, H], weights and ids [T, K], gate_up [E, 2 I, H], down [E, H, I] -> [T, H] as x."""
    if gate_up_scale is not None:
        return reference(x, weights, ids, gate_up, down, gate_up_scale, down_scale)
    num_chosen = ids.shape[1]
    rows_by_expert = torch.bincount(ids.flatten(), minlength=len(gate_up)).tolist()
    order = ids.flatten().argsort(stable=True)
    rows = order // num_chosen
    scales = weights.flatten()[order, None]
    y = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, weights.dtype))
    begin = 0
    for expert, num_rows in enumerate(rows_by_expert):
        if num_rows:
            own = slice(begin, begin + num_rows)
            gate, up = linear(x[rows[own]], gate_up[expert], None).chunk(2, dim=-1)
            out = linear(silu_mul(gate, up), down[expert], None)
            y.index_add_(0, rows[own], out.to(y.dtype) * scales[own])
            begin += num_rows
    return y.to(x.dtype)
