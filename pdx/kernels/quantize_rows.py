"""Activations as float8: each 128 values of a row with a scale of their own.

Specification: ``kernels/reference/quantize_rows``. NaN stays NaN, and an infinity makes its block
NaN: what is wrong is seen. Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3.2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.gemm_tiles import QUANT_BLOCK
from pdx.kernels.kv_view import FLOAT8

__all__ = ["quantize_rows"]

_LARGEST = 448.0
#: Blocks of one program.
_BLOCKS = 8


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> float8_e4m3fn [T, K], float32 [T, K / 128 rounded up]: x is their product.

    Args:
        x: bfloat16, float16 or float32; rows of any distance, elements side by side.
    """
    num_rows, size = x.shape
    assert x.stride(1) == 1
    num_blocks = -(-size // QUANT_BLOCK)
    values = torch.empty(num_rows, size, dtype=FLOAT8, device=x.device)
    scales = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=x.device)
    if num_rows:
        _kernel[(num_rows, -(-num_blocks // _BLOCKS))](
            x,
            values,
            scales,
            size,
            num_blocks,
            x.stride(0),
            LARGEST=_LARGEST,
            BLOCKS=_BLOCKS,
            QUANT=QUANT_BLOCK,
            num_warps=4,
        )
    return values, scales


@triton.jit
def _kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    size,
    num_blocks,
    stride_x,
    LARGEST: tl.constexpr,
    BLOCKS: tl.constexpr,
    QUANT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * QUANT + tl.arange(0, QUANT)[None, :]
    is_x = column < size
    x = tl.load(x_ptr + row * stride_x + column, mask=is_x, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    scale = tl.where(largest > 0, largest / LARGEST, 1.0)
    tl.store(scales_ptr + row * num_blocks + block, scale, mask=block < num_blocks)
    values = (x / scale[:, None]).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + row * size + column, values, mask=is_x)
