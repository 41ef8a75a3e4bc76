"""Absorbed MLA attention of a few rows per request over its paged latents: decode and drafts.

Row j of n sees the first context_len - n + j + 1 tokens: softmax(q [c; r]^T scale) c.
Specification: ``kernels/reference/mla_attention``.

A tile of latents is loaded once and is both keys and values; the rotated keys are a second product
into the same scores. With up to 32 rows a launch waits for memory; 64 rows fill a warp group's
matrix instruction, and more heads are more programs. Parts of a context as in ``paged_decode``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels import decisions
from pdx.kernels.attention_tiles import (
    LOG2_E,
    finish,
    softmax_step,
    split_range,
    tile_pages,
    token_offsets,
)
from pdx.kernels.batch import RequestGroup
from pdx.kernels.merge_splits import Splits, merge_splits
from pdx.kernels.triton_dtypes import triton_dtype

__all__ = ["mla_decode"]


def mla_decode(
    q: Tensor,
    kv: Tensor,
    group: RequestGroup,
    scale: float,
    latent_dim: int,
    *,
    num_splits: int | None = None,
) -> Tensor:
    """q [T, Hq, R + E], kv [P, S, R + E] (one layer, appended) -> [T, Hq, R] in q's dtype.

    R = ``latent_dim`` and E are powers of 2, E at least 16. ``num_splits``: parts of a context;
    chosen from the launch's size where it is None.
    """
    num_heads, width, page_size = q.shape[1], q.shape[2], kv.shape[1]
    assert kv.stride()[1:] == (width, 1) and q.stride(2) == 1 and kv.dtype == q.dtype
    out = q.new_empty(q.shape[0], num_heads, latent_dim)
    if not len(group) or not group.max_query_len:
        return out
    most_rows = num_heads * group.max_query_len
    config = decisions.mla_decode_config(decisions.arch_of(q.device), most_rows, q.dtype)
    num_blocks = -(-most_rows // config.block_m)
    if num_splits is None:
        num_splits = decisions.num_splits_for(len(group) * num_blocks, group.max_seq_len, q.device)
    splits = Splits.empty(group, num_heads, num_splits, latent_dim) if num_splits > 1 else None
    _kernel[(len(group), num_blocks, num_splits)](
        q,
        kv,
        out,
        out if splits is None else splits.parts,
        out if splits is None else splits.lse,
        group.query_starts,
        group.query_lens,
        group.seq_lens,
        group.table_starts,
        group.page_tables,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        kv.stride(0),
        NUM_HEADS=num_heads,
        MAX_ROWS=group.max_query_len,
        LATENT=latent_dim,
        ROPE=width - latent_dim,
        PAGE_SIZE=page_size,
        COMPUTE=triton_dtype(q.dtype),
        NUM_SPLITS=num_splits,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    if splits is not None:
        merge_splits(splits, group, out)
    return out


@triton.jit
def _kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    parts_ptr,
    lse_ptr,
    row_starts_ptr,
    num_rows_ptr,
    context_lens_ptr,
    table_starts_ptr,
    page_indices_ptr,
    score_factor,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_page,
    NUM_HEADS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    COMPUTE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    WIDTH: tl.constexpr = LATENT + ROPE
    request, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_rows = tl.load(num_rows_ptr + request)
    if block * BLOCK_M >= num_rows * NUM_HEADS:
        return
    context_len = tl.load(context_lens_ptr + request)
    table_ptr = page_indices_ptr + tl.load(table_starts_ptr + request)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = m // NUM_HEADS, m % NUM_HEADS
    is_row = row < num_rows
    position = context_len - num_rows + row

    first, stop = split_range(0, context_len, split, BLOCK_N, NUM_SPLITS)
    place = (request * MAX_ROWS + row).to(tl.int64)
    part = (place * NUM_HEADS + head) * NUM_SPLITS + split
    if NUM_SPLITS > 1:
        if stop <= first:
            tl.store(lse_ptr + part, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=is_row)
            return

    c = tl.arange(0, LATENT)
    r = LATENT + tl.arange(0, ROPE)
    token = (tl.load(row_starts_ptr + request) + row).to(tl.int64)
    rows = q_ptr + (token * stride_qt + head * stride_qh)[:, None]
    q_latent = tl.load(rows + c[None, :], mask=is_row[:, None], other=0.0).to(COMPUTE)
    q_rope = tl.load(rows + r[None, :], mask=is_row[:, None], other=0.0).to(COMPUTE)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, LATENT), tl.float32)
    next_pages = tile_pages(table_ptr, first, stop, PAGE_SIZE, BLOCK_N)
    for n0 in tl.range(first, stop, BLOCK_N, num_stages=STAGES):
        n = n0 + tl.arange(0, BLOCK_N)
        pages = next_pages
        next_pages = tile_pages(table_ptr, n0 + BLOCK_N, stop, PAGE_SIZE, BLOCK_N)
        offsets = token_offsets(pages, n0, stride_page, PAGE_SIZE, BLOCK_N, WIDTH)[:, None]
        # What lies past the context may be NaN: the latents must be 0 there, not only the weights.
        is_kv = (n < stop)[:, None]
        latent = tl.load(kv_ptr + offsets + c[None, :], mask=is_kv, other=0.0)
        rope = tl.load(kv_ptr + offsets + r[None, :], mask=is_kv, other=0.0)
        scores = tl.dot(q_latent, latent.T, input_precision="ieee")
        scores = tl.dot(q_rope, rope.T, scores, input_precision="ieee") * score_factor
        is_seen = (n[None, :] <= position[:, None]) & (n < stop)[None, :]
        scores = tl.where(is_seen, scores, float("-inf"))
        row_max, row_sum, acc = softmax_step(scores, latent, row_max, row_sum, acc)

    result = finish(row_sum, acc)
    if NUM_SPLITS > 1:
        tl.store(parts_ptr + part[:, None] * LATENT + c[None, :], result, mask=is_row[:, None])
        tl.store(lse_ptr + part, row_max + tl.log2(row_sum), mask=is_row)
    else:
        out = out_ptr + (token * stride_ot + head * stride_oh)[:, None] + c[None, :]
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
