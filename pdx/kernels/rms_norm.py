"""RMSNorm, and RMSNorm of a residual stream with what is added to it, in one pass over memory.

Specification: ``kernels/reference/rms_norm`` and ``kernels/reference/add_rms_norm``, with the same
roundings; squares are added up in float32. A program has whole rows: one of a hidden state, many of
a head's size, so that each of its threads loads 16 bytes at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.attention_tiles import next_power_of_2
from pdx.kernels.decisions import row_config

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H], weight [H] -> [..., H] in x's dtype.

    Args:
        x: bfloat16, float16 or float32; rows of any distance, elements side by side.
        weight: in x's dtype, contiguous.
        eps: added to the mean square.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, None, weight, eps, None, out)
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and y [..., H], weight [H] -> x + y and its norm, [..., H] each, in x's dtype.

    Args:
        x: as of ``rms_norm``: the residual stream. It stays as it is.
        y: likewise, in x's dtype: what a layer adds.
        weight: in x's dtype, contiguous.
        eps: added to the mean square.
    """
    total, out = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    _launch(x, y, weight, eps, total, out)
    return total, out


def _launch(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, total: Tensor | None, out: Tensor
) -> None:
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    added = rows if y is None else y.reshape(-1, size)
    assert rows.stride(1) == added.stride(1) == weight.stride(0) == 1
    assert rows.shape == added.shape and weight.shape == (size,)
    assert rows.dtype == added.dtype == weight.dtype
    if not len(rows):
        return
    config = row_config(size)
    _kernel[(-(-len(rows) // config.block_m),)](
        rows,
        added,
        weight,
        out if total is None else total,
        out,
        eps,
        len(rows),
        rows.stride(0),
        added.stride(0),
        SIZE=size,
        IS_SUM=y is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=next_power_of_2(size),
        num_warps=config.num_warps,
    )


@triton.jit
def _kernel(
    x_ptr,
    y_ptr,
    weight_ptr,
    total_ptr,
    out_ptr,
    eps,
    num_rows,
    stride_x,
    stride_y,
    SIZE: tl.constexpr,
    IS_SUM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    is_x = (row < num_rows) & (column < SIZE)
    x = tl.load(x_ptr + row * stride_x + column, mask=is_x, other=0.0).to(tl.float32)
    if IS_SUM:
        x += tl.load(y_ptr + row * stride_y + column, mask=is_x, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * SIZE + column, total, mask=is_x)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    # Rounded before the weight, as the specification has it.
    normed = (x * scale).to(out_ptr.dtype.element_ty).to(tl.float32) * weight
    tl.store(out_ptr + row * SIZE + column, normed.to(out_ptr.dtype.element_ty), mask=is_x)
