"""Matrix products of layers: y = x w^T + bias, the weight as it is or in blocks of float8.

Specification: ``kernels/reference/linear`` and ``kernels/reference/linear_float8``. Few rows leave
few tiles, and the weight's way from memory is the time: then the summed axis is cut into parts
(Split-K), and the program that comes last to a tile adds the parts up in their order, so the sum is
the same every time. Where rows are fewer than the matrix unit's 64, weight and input change sides
(swap-AB), so that the weight's rows fill it. Many rows go in groups of tiles that share what the L2
cache has. Sources: Hoque et al. 2024, "Accelerating a Triton Fused Kernel for W4A16 Quantized
Inference with SplitK Work Decomposition"; the grouped order is that of Triton's own tutorial.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.decisions import LinearConfig, arch_of, linear_config, num_k_splits_for
from pdx.kernels.gemm_tiles import (
    QUANT_BLOCK,
    operands,
    scaled_tile_product,
    tile_constants,
    tile_product,
)
from pdx.kernels.kv_view import FLOAT8

__all__ = ["MAX_SPLIT_TILES", "linear", "linear_float8", "split_counters"]

#: A launch with more tiles than this fills a GPU without parts.
MAX_SPLIT_TILES = 1024
#: Tiles of rows that run together over all columns.
_GROUP_M = 8


def split_counters(device: torch.device) -> Tensor:
    """int32 [MAX_SPLIT_TILES] of zeros, which launches on one stream share.

    A launch leaves them at zero. Give every launch of a captured graph the same ones.
    """
    return torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    counters: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N] in x's dtype.

    Args:
        x: bfloat16, float16 or float32; rows of any distance, elements side by side.
        weight: in x's dtype, likewise.
        bias: any float dtype; added in float32.
        counters: see ``split_counters``; made for this launch where it is None.
        num_splits: parts of the sum; chosen from the launch's size where it is None.
    """
    assert x.dtype == weight.dtype
    return _launch(x, weight, bias, None, None, x.dtype, counters, num_splits)


def linear_float8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    x_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    counters: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """x [T, K], weight [N, K] times its scales, bias [N] -> [T, N]. For GPUs from sm_90 on.

    Args:
        x: bfloat16, float16 or float32, multiplied as it is; or float8_e4m3fn with ``x_scale``
            (``quantize_rows``), for the matrix unit's float8 rate.
        weight: float8_e4m3fn.
        scale: float32 [N / 128, K / 128], both rounded up, contiguous: of 128 x 128 values.
        bias: any float dtype; added in float32.
        x_scale: float32 [T, K / 128 rounded up], contiguous.
        dtype: of the result; x's where it is None.
        counters: as of ``linear``.
        num_splits: likewise.
    """
    assert weight.dtype == FLOAT8 and (x.dtype == FLOAT8) == (x_scale is not None)
    blocks = tuple(-(-each // QUANT_BLOCK) for each in weight.shape)
    assert scale.shape == blocks and scale.is_contiguous()
    assert x_scale is None or (x_scale.shape == (len(x), blocks[1]) and x_scale.is_contiguous())
    return _launch(x, weight, bias, x_scale, scale, dtype or x.dtype, counters, num_splits)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    counters: Tensor | None,
    num_splits: int | None,
) -> Tensor:
    (num_rows, size), num_columns = x.shape, len(weight)
    assert weight.shape[1] == size and x.stride(1) == weight.stride(1) == 1
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=x.device)
    if not num_rows:
        return out
    config: LinearConfig = linear_config(arch_of(x.device), num_rows, x.dtype, weight.dtype)
    num_m, num_n = -(-num_rows // config.block_m), -(-num_columns // config.block_n)
    if num_splits is None:
        num_splits = num_k_splits_for(num_m * num_n, size, config.block_k, x.device)
    if num_splits > 1:
        assert num_m * num_n <= MAX_SPLIT_TILES
        counters = split_counters(x.device) if counters is None else counters
        parts = torch.empty(num_splits, num_rows, num_columns, dtype=torch.float32, device=x.device)
    _kernel[(num_m * num_n, num_splits)](
        *operands(x, weight, x_scale, scale),
        out if bias is None else bias,
        out,
        out if num_splits == 1 else parts,
        out if num_splits == 1 else counters,
        num_rows,
        num_columns,
        size,
        x.stride(0),
        weight.stride(0),
        HAS_BIAS=bias is not None,
        NUM_SPLITS=num_splits,
        IS_SWAPPED=config.is_swapped,
        GROUP_M=_GROUP_M,
        **tile_constants(config, size, x_scale, scale),
    )
    return out


# One kernel for all numbers of rows that have the same tiles: a batch of 1 is no constant.
@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x_ptr,
    w_ptr,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    num_rows,
    num_columns,
    size,
    stride_x,
    stride_w,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_X_SCALES: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    num_m, num_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    group_first = tile // (GROUP_M * num_n) * GROUP_M
    group_rows = tl.minimum(num_m - group_first, GROUP_M)
    place = tile % (GROUP_M * num_n)
    m = (group_first + place % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = place // group_rows * BLOCK_N + tl.arange(0, BLOCK_N)
    row, column = (m % num_rows).to(tl.int64), (n % num_columns).to(tl.int64)

    # Parts of whole blocks; the last ones of a short axis may be empty.
    part = tl.cdiv(tl.cdiv(size, BLOCK_K), NUM_SPLITS) * BLOCK_K
    first = split * part
    stop = tl.minimum(first + part, size)
    x_rows, w_rows = x_ptr + row * stride_x, w_ptr + column * stride_w
    if IS_SWAPPED:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if HAS_SCALES:
        num_k = tl.cdiv(size, BLOCK_K)
        acc = scaled_tile_product(
            x_rows,
            w_rows,
            x_scale_ptr + row * num_k,
            w_scale_ptr + column // BLOCK_K * num_k,
            first,
            stop,
            acc,
            HAS_X_SCALES,
            IS_SWAPPED,
            EVEN_K,
            BLOCK_K,
            STAGES,
        )
    else:
        acc = tile_product(x_rows, w_rows, first, stop, acc, IS_SWAPPED, EVEN_K, BLOCK_K, STAGES)

    if IS_SWAPPED:
        offsets = m.to(tl.int64)[None, :] * num_columns + n[:, None]
        is_out = (m < num_rows)[None, :] & (n < num_columns)[:, None]
    else:
        offsets = m.to(tl.int64)[:, None] * num_columns + n[None, :]
        is_out = (m < num_rows)[:, None] & (n < num_columns)[None, :]
    if NUM_SPLITS > 1:
        stride_part = num_rows.to(tl.int64) * num_columns
        tl.store(parts_ptr + split * stride_part + offsets, acc, mask=is_out)
        # Triton before 3.9 puts no barrier before a release; see progress_word.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived != NUM_SPLITS - 1:
            return
        tl.debug_barrier()
        acc = tl.zeros_like(acc)
        for i in range(NUM_SPLITS):
            parts = parts_ptr + i * stride_part + offsets
            acc += tl.load(parts, mask=is_out, other=0.0, cache_modifier=".cg")
        tl.atomic_xchg(counters_ptr + tile, 0, sem="relaxed", scope="gpu")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column).to(tl.float32)
        if IS_SWAPPED:
            acc += bias[:, None]
        else:
            acc += bias[None, :]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=is_out)
