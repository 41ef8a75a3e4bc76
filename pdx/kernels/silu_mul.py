"""The gate of a SwiGLU MLP, gate * sigmoid(gate) * up, in one pass over memory.

Specification: ``kernels/reference/silu_mul``, with the same roundings. The two may be halves of one
projection's output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["silu_mul"]

#: Elements of one program: 8 for each of 128 threads, 16 bytes of a 16-bit dtype.
_BLOCK = 1024


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [..., I] -> [..., I] in their dtype.

    Args:
        gate: bfloat16, float16 or float32; rows of any distance, elements side by side.
        up: likewise.
    """
    size = gate.shape[-1]
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gates, ups = gate.reshape(-1, size), up.reshape(-1, size)
    assert gates.shape == ups.shape and gates.dtype == ups.dtype
    assert gates.stride(1) == ups.stride(1) == 1
    if gates.numel():
        grid = (len(gates), -(-size // _BLOCK))
        strides = gates.stride(0), ups.stride(0)
        _kernel[grid](gates, ups, out, size, *strides, BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def gated(gate, up, dtype: tl.constexpr):
    """float32 tiles -> float32 values of ``dtype``, rounded between the factors and at the end."""
    inner = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    return (inner * up).to(dtype)


@triton.jit
def _kernel(gate_ptr, up_ptr, out_ptr, size, stride_g, stride_u, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_x = column < size
    gate = tl.load(gate_ptr + row * stride_g + column, mask=is_x, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_u + column, mask=is_x, other=0.0).to(tl.float32)
    result = gated(gate, up, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + column, result, mask=is_x)
