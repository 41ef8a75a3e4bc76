"""Rotary positions on a CPU: one pass over memory, in native code.

Specification: ``kernels/reference/rope``, with the same roundings. Measured on one core of two,
bfloat16, 9 heads of 64, against the reference: 4.1 us to 21 us for one token,
0.34 ms to 2.0 ms for 1,024.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.cpu.native_ops import NATIVE_DTYPES, native_ops
from pdx.kernels.reference.rope import rope as reference

__all__ = ["rope"]


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D]; cos and sin [T, D/2] of the angles, float32 or wider -> [T, H, D] as x."""
    if x.dtype not in NATIVE_DTYPES or cos.dtype != torch.float32:
        return reference(x, cos, sin)
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    y = torch.empty_like(x)
    num_tokens, num_heads, head_dim = x.shape
    native_ops().pdx_rope(
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        y.data_ptr(),
        num_tokens,
        num_heads,
        head_dim // 2,
        x.dtype == torch.bfloat16,
    )
    return y
