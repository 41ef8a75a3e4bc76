"""The MLPs of a sparse layer: y[t] = sum over t's experts e of weight * MLP_e(x[t]).

An MLP is SwiGLU without biases, its gate's and its up projection's rows in one tensor, in this
order. Weighed and summed in at least float32. Source: as ``routing``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.reference.accumulate import widen
from pdx.kernels.reference.linear import linear
from pdx.kernels.reference.linear_float8 import dequantised_blocks
from pdx.kernels.reference.silu_mul import silu_mul

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
    """x [T, H], weights and ids [T, K], gate_up [E, 2 I, H], down [E, H, I] -> [T, H] as x.

    Args:
        gate_up_scale: float32 [E, 2 I / 128, H / 128] rounded up, where gate_up is float8 blocks.
        down_scale: float32 [E, H / 128, I / 128] rounded up, likewise.
    """
    if gate_up_scale is not None and down_scale is not None:
        gate_up = dequantised_blocks(gate_up, gate_up_scale)
        down = dequantised_blocks(down, down_scale)
    y = torch.zeros_like(widen(x))
    for expert in sorted(set(ids.flatten().tolist())):
        rows, places = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[rows], gate_up[expert], None).chunk(2, dim=-1)
        out = linear(silu_mul(gate, up), down[expert], None)
        y.index_add_(0, rows, widen(out) * weights[rows, places, None])
    return y.to(x.dtype)
