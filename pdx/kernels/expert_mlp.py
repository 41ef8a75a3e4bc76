"""The MLPs of a sparse layer on a GPU: sort, one product up, the gate, one product down, sum up.

Specification: ``kernels/reference/expert_mlp``, with the same roundings. Seven launches whose sizes
depend on T alone: nothing waits for what the router chose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.decisions import arch_of, expert_config
from pdx.kernels.expert_combine import expert_combine
from pdx.kernels.expert_linear import expert_linear
from pdx.kernels.expert_order import expert_order
from pdx.kernels.silu_mul import silu_mul

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
        x: bfloat16, float16 or float32.
        weights: float32.
        ids: int; experts that exist.
        gate_up: in x's dtype, or float8_e4m3fn (sm_90 and up) with ``gate_up_scale``.
        down: likewise, with ``down_scale``.
        gate_up_scale: float32, one for 128 x 128 values: [E, 2 I / 128, H / 128], rounded up.
        down_scale: float32 [E, H / 128, I / 128], rounded up.
    """
    num_pairs = ids.numel()
    if not num_pairs:
        return torch.zeros_like(x)
    num_experts = len(gate_up)
    config = expert_config(arch_of(x.device), num_pairs, num_experts, x.dtype, gate_up.dtype)
    order = expert_order(ids, num_experts, config.block_m)
    inner = expert_linear(x, gate_up, order, config, num_pairs, weight_scale=gate_up_scale)
    gated = silu_mul(*inner.chunk(2, dim=-1))
    out = expert_linear(gated, down, order, config, num_pairs, weight_scale=down_scale)
    return expert_combine(out, weights.float().contiguous())
