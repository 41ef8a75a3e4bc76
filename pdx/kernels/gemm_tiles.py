"""What the matrix products share: a tile of x w^T, as it is or with float8's scales.

Pointers of rows stand in for whole tensors: [M] and [N] pointers at the first of K values that lie
side by side. A row past the end may point anywhere that can be read, as its results are not stored;
so only K is masked, and only where a block does not divide it. Sums are float32.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.decisions import TileConfig

__all__ = ["QUANT_BLOCK", "operands", "scaled_tile_product", "tile_constants", "tile_product"]

#: Values that share a scale: of a row of activations; of a weight's rows, and of its columns.
QUANT_BLOCK = 128


def operands(
    x: Tensor, weight: Tensor, x_scale: Tensor | None, weight_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four as a launch takes them: what is None is some pointer that is never read."""
    return (
        x,
        weight,
        x if x_scale is None else x_scale,
        weight if weight_scale is None else weight_scale,
    )


def tile_constants(
    config: TileConfig, size: int, x_scale: Tensor | None, weight_scale: Tensor | None
) -> dict[str, Any]:
    """Constants and options of a launch of this file's tiles over a sum of ``size``.

    A block of a scaled sum is what one scale is of.
    """
    block_k = config.block_k if weight_scale is None else QUANT_BLOCK
    return {
        "HAS_SCALES": weight_scale is not None,
        "HAS_X_SCALES": x_scale is not None,
        "EVEN_K": size % block_k == 0,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": block_k,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


@triton.jit
def _load_tiles(x_rows, w_rows, columns, stop, EVEN_K: tl.constexpr):
    """Columns [K] of the rows: x [M, K] and w [N, K]."""
    x_ptrs = x_rows[:, None] + columns[None, :]
    w_ptrs = w_rows[:, None] + columns[None, :]
    if EVEN_K:
        x, w = tl.load(x_ptrs), tl.load(w_ptrs)
    else:
        is_k = (columns < stop)[None, :]
        x = tl.load(x_ptrs, mask=is_k, other=0.0)
        w = tl.load(w_ptrs, mask=is_k, other=0.0)
    return x, w


@triton.jit
def tile_product(
    x_rows,
    w_rows,
    first,
    stop,
    acc,
    IS_SWAPPED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """acc + x w^T over columns first..stop, float32 [M, N]; IS_SWAPPED: its transpose [N, M].

    EVEN_K: blocks divide what is between first and stop.
    """
    k = tl.arange(0, BLOCK_K)
    for k0 in tl.range(first, stop, BLOCK_K, num_stages=STAGES):
        x, w = _load_tiles(x_rows, w_rows, k0 + k, stop, EVEN_K)
        if IS_SWAPPED:
            acc = tl.dot(w, x.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
    return acc


@triton.jit
def scaled_tile_product(
    x_rows,
    w_rows,
    x_scales,
    w_scales,
    first,
    stop,
    acc,
    HAS_X_SCALES: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``tile_product`` of float8 weights; x is float8 with scales of its own, or wider without.

    Args (beside those above):
        x_scales, w_scales: [M] and [N] pointers at each row's first scale, one for BLOCK_K columns.

    A block's product is scaled, and only then added: sums in float8's matrix unit have few bits,
    and one block is as long as they get.
    """
    k = tl.arange(0, BLOCK_K)
    for k0 in tl.range(first, stop, BLOCK_K, num_stages=STAGES):
        x, w = _load_tiles(x_rows, w_rows, k0 + k, stop, EVEN_K)
        scale = tl.load(w_scales + k0 // BLOCK_K)
        if not HAS_X_SCALES:
            w = w.to(x.dtype)
        if IS_SWAPPED:
            block = tl.dot(w, x.T, input_precision="ieee") * scale[:, None]
            if HAS_X_SCALES:
                block *= tl.load(x_scales + k0 // BLOCK_K)[None, :]
        else:
            block = tl.dot(x, w.T, input_precision="ieee") * scale[None, :]
            if HAS_X_SCALES:
                block *= tl.load(x_scales + k0 // BLOCK_K)[:, None]
        acc += block
    return acc
