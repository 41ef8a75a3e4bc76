"""The MLPs of a sparse layer: y[t] = sum over t's experts e of weight * MLP_e(x[t]).

An MLP is SwiGLU without biases, its gate's and its up projection's rows in one tensor, in this
order. Weighed and summed in at least float32. Source: as ``routing``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.reference.accumulate import widen
from pdx.kernels.reference.linear import linear
from pdx.kernels.reference.silu_mul import silu_mul

__all__ = ["expert_mlp"]


def expert_mlp(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [T, H], weights and ids [T, K], gate_up [E, 2 I, H], down [E, H, I] -> [T, H] as x."""
    y = torch.zeros_like(widen(x))
    for expert in sorted(set(ids.flatten().tolist())):
        rows, places = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[rows], gate_up[expert], None).chunk(2, dim=-1)
        out = linear(silu_mul(gate, up), down[expert], None)
        y.index_add_(0, rows, widen(out) * weights[rows, places, None])
    return y.to(x.dtype)
