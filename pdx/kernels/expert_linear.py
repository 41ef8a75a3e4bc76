"""One matrix product for all experts: each block of rows meets its expert's weight.

y[p] = x[p // D] w[expert of p]^T for pairs p in the order of ``expert_order``. Which experts a
launch reads is settled on the device: its grid is the bound, and unused blocks end at once. Columns
are the inner axis of the grid, so blocks of one expert follow each other and share its weight in
the cache. Source of the blocks: Gale et al. 2022, "MegaBlocks", section 5.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.decisions import TileConfig
from pdx.kernels.expert_order import ExpertOrder
from pdx.kernels.gemm_tiles import (
    QUANT_BLOCK,
    operands,
    scaled_tile_product,
    tile_constants,
    tile_product,
)
from pdx.kernels.kv_view import FLOAT8

__all__ = ["expert_linear"]


def expert_linear(
    x: Tensor,
    weight: Tensor,
    order: ExpertOrder,
    config: TileConfig,
    num_pairs: int,
    *,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x [R, K] -> [num_pairs, N] in ``dtype``; pairs that the order leaves out are not written.

    Args:
        x: R divides the pairs; row r is of pairs r D to r D + D - 1. Columns lie side by side.
        weight: [E, N, K] in x's dtype, or float8_e4m3fn (sm_90 and up).
        order: of the pass, in blocks of ``config.block_m``.
        config: tile sizes.
        num_pairs: T K, more than 0.
        x_scale: float32 [R, K / 128 rounded up] of a float8 x.
        weight_scale: float32 [E, N / 128, K / 128], both rounded up, of a float8 weight.
        dtype: of the result; x's own where it is None.
    """
    num_experts, num_columns, size = weight.shape
    assert x.shape[1] == size and num_pairs % len(x) == 0 and x.stride(1) == weight.stride(2) == 1
    assert order.block_m == config.block_m
    assert (weight.dtype == FLOAT8) == (weight_scale is not None)
    assert (x.dtype == FLOAT8) == (x_scale is not None)
    if weight_scale is not None:
        blocks = -(-num_columns // QUANT_BLOCK), -(-size // QUANT_BLOCK)
        assert weight_scale.shape == (num_experts, *blocks) and weight_scale.is_contiguous()
    out = torch.empty(num_pairs, num_columns, dtype=dtype or x.dtype, device=x.device)
    _kernel[(-(-num_columns // config.block_n), order.num_blocks)](
        *operands(x, weight, x_scale, weight_scale),
        out,
        order.pairs,
        order.block_experts,
        num_columns,
        size,
        num_pairs // len(x),
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        0 if x_scale is None else x_scale.stride(0),
        QUANT=QUANT_BLOCK,
        **tile_constants(config, size, x_scale, weight_scale),
    )
    return out


# Products up and down are then one kernel: a pair's row up is its token's, down its own.
@triton.jit(do_not_specialize=["pairs_of_row"])
def _kernel(
    x_ptr,
    w_ptr,
    x_scale_ptr,
    w_scale_ptr,
    out_ptr,
    pairs_ptr,
    block_experts_ptr,
    num_columns,
    size,
    pairs_of_row,
    stride_x,
    stride_we,
    stride_wn,
    stride_xs,
    EVEN_K: tl.constexpr,
    QUANT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_X_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    row = (tl.maximum(pair, 0) // pairs_of_row).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = n % num_columns
    x_rows = x_ptr + row * stride_x
    w_rows = w_ptr + expert * stride_we + column.to(tl.int64) * stride_wn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if HAS_SCALES:
        num_n, num_k = tl.cdiv(num_columns, QUANT), tl.cdiv(size, QUANT)
        w_scales = w_scale_ptr + (expert * num_n + column // QUANT) * num_k
        x_scales = x_scale_ptr + row * stride_xs
        acc = scaled_tile_product(
            x_rows,
            w_rows,
            x_scales,
            w_scales,
            0,
            size,
            acc,
            HAS_X_SCALES,
            False,
            EVEN_K,
            BLOCK_K,
            STAGES,
        )
    else:
        acc = tile_product(x_rows, w_rows, 0, size, acc, False, EVEN_K, BLOCK_K, STAGES)
    out = out_ptr + pair.to(tl.int64)[:, None] * num_columns + n[None, :]
    is_out = (pair >= 0)[:, None] & (n < num_columns)[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_out)
