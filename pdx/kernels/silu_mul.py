"""The gate of a SwiGLU MLP, gate * sigmoid(gate) * up, in one pass over memory.

Specification: ``kernels/reference/silu_mul``, with the same roundings. The two may be halves of one
projection's output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.attention_tiles import next_power_of_2

__all__ = ["silu_mul"]

#: Elements of one program: 8 for each of 128 threads, 16 bytes of a 16-bit dtype. Short rows share
#: a program.
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
        block_n = min(_BLOCK, next_power_of_2(size))
        block_m = _BLOCK // block_n
        _kernel[(-(-len(gates) // block_m), -(-size // block_n))](
            gates,
            ups,
            out,
            len(gates),
            size,
            gates.stride(0),
            ups.stride(0),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=4,
        )
    return out


@triton.jit
def _kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    num_rows,
    size,
    stride_g,
    stride_u,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    is_x = (row < num_rows) & (column < size)
    gate = tl.load(gate_ptr + row * stride_g + column, mask=is_x, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_u + column, mask=is_x, other=0.0).to(tl.float32)
    inner = (gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * size + column, (inner * up).to(out_ptr.dtype.element_ty), mask=is_x)
