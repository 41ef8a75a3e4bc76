"""Puts a token's experts together: y[t] = sum over k of weights[t, k] * x[t K + k].

In float32, in the order of k, rounded once: the same sum whatever order the experts ran in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.attention_tiles import next_power_of_2

__all__ = ["expert_combine"]

#: Elements of one program; short rows share one.
_BLOCK = 1024


def expert_combine(x: Tensor, weights: Tensor) -> Tensor:
    """x [T K, H] (contiguous), weights float32 [T, K] (contiguous) -> [T, H] in x's dtype."""
    num_tokens, num_chosen = weights.shape
    size = x.shape[1]
    assert len(x) == num_tokens * num_chosen and x.is_contiguous() and weights.is_contiguous()
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    if num_tokens:
        block_n = min(_BLOCK, next_power_of_2(size))
        block_m = _BLOCK // block_n
        _kernel[(-(-num_tokens // block_m), -(-size // block_n))](
            x,
            weights,
            out,
            num_tokens,
            size,
            NUM_CHOSEN=num_chosen,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=4,
        )
    return out


@triton.jit
def _kernel(
    x_ptr,
    weights_ptr,
    out_ptr,
    num_tokens,
    size,
    NUM_CHOSEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    token = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    is_token = token < num_tokens
    is_x = is_token[:, None] & (column < size)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + k
        x = tl.load(x_ptr + pair[:, None] * size + column, mask=is_x, other=0.0).to(tl.float32)
        weight = tl.load(weights_ptr + pair, mask=is_token, other=0.0)
        total += weight[:, None] * x
    out = out_ptr + token[:, None] * size + column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_x)
