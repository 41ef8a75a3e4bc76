"""Attention of a few rows per request over its whole paged context: decode, and drafts to verify.

Row j of n sees the first context_len - n + j + 1 tokens (with a window, the last ``window`` of
those): softmax(cap(q k^T scale)) v. Specification: ``kernels/reference/paged_attention``.

A program takes one request, one KV head and one part (split) of the context. All query heads of the
KV head, times the rows, are the rows of one matrix product, so that each K and V is read once. The
parts are cut inside the kernel from the request's own length, so that a captured graph stays right
for every length. Sources: Dao et al., Flash-Decoding, 2023; grouped heads packed as rows: Ringlein
et al. 2025, "The Anatomy of a Triton Attention Kernel".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.attention_tiles import (
    ScoreScale,
    capped,
    finish,
    next_power_of_2,
    softmax_step,
    split_range,
    tile_pages,
    token_offsets,
)
from pdx.kernels.batch import RequestGroup
from pdx.kernels.decisions import decode_config, num_splits_for
from pdx.kernels.kv_view import check_kv
from pdx.kernels.merge_splits import Splits, merge_splits
from pdx.kernels.triton_dtypes import compute_dtype

__all__ = ["paged_decode"]


def paged_decode(
    q: Tensor,
    kv: Tensor,
    group: RequestGroup,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """q [T, Hq, D], kv [P, Hkv, 2, S, D] (one layer, appended) -> [T, Hq, D] in q's dtype.

    Args:
        q: the pass's queries; its rows may be strided.
        kv: in q's dtype, or float8_e4m3fn (sm_90 and up) that ``kv_scales`` turn into numbers.
        group: requests of few rows each; only their rows of the result are written.
        scale: of the scores.
        window: how many tokens a row sees at most, its own included.
        soft_cap: of the scores' size.
        kv_scales: what a stored K, and a stored V, of 1 means.
        num_splits: parts of a context; chosen from the launch's size where it is None.
        out: the result's memory, where another kernel fills other rows of it.
    """
    check_kv(q, kv)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if not len(group) or not group.max_query_len:
        return out
    num_kv_heads, page_size, head_dim = kv.shape[1], kv.shape[3], kv.shape[4]
    num_groups = q.shape[1] // num_kv_heads
    config = decode_config(num_groups * group.max_query_len, head_dim, kv.dtype)
    if num_splits is None:
        seen = min(group.max_seq_len, (window or group.max_seq_len) + group.max_query_len)
        num_splits = num_splits_for(len(group) * num_kv_heads, seen, q.device)
    # Without parts to merge, the kernel writes the result itself.
    splits = Splits.empty(group, q.shape[1], num_splits, head_dim) if num_splits > 1 else None
    score = ScoreScale.of(scale * kv_scales[0], soft_cap)
    _kernel[(len(group), num_kv_heads, num_splits)](
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
        score.factor,
        score.cap,
        kv_scales[1],
        window or 0,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        kv.stride(0),
        NUM_GROUPS=num_groups,
        MAX_ROWS=group.max_query_len,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        COMPUTE=compute_dtype(q, kv),
        HAS_CAP=soft_cap is not None,
        HAS_WINDOW=window is not None,
        NUM_SPLITS=num_splits,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=next_power_of_2(head_dim),
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
    score_cap,
    v_scale,
    window,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_page,
    NUM_GROUPS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    COMPUTE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1) * NUM_GROUPS
    num_rows = tl.load(num_rows_ptr + request)
    if num_rows == 0:
        return
    context_len = tl.load(context_lens_ptr + request)
    table_ptr = page_indices_ptr + tl.load(table_starts_ptr + request)

    # Matrix row m is token row m // NUM_GROUPS and query head m % NUM_GROUPS of the KV head.
    m = tl.arange(0, BLOCK_M)
    row, head = m // NUM_GROUPS, kv_head * NUM_GROUPS + m % NUM_GROUPS
    is_row = row < num_rows
    position = context_len - num_rows + row
    d = tl.arange(0, BLOCK_D)
    is_d = d < HEAD_DIM

    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(context_len - num_rows + 1 - window, 0) // BLOCK_N * BLOCK_N
    first, stop = split_range(begin, context_len, split, BLOCK_N, NUM_SPLITS)

    place = (request * MAX_ROWS + row).to(tl.int64)
    part = (place * num_heads + head) * NUM_SPLITS + split
    if NUM_SPLITS > 1:
        if stop <= first:
            tl.store(lse_ptr + part, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=is_row)
            return

    token = (tl.load(row_starts_ptr + request) + row).to(tl.int64)
    q_offsets = (token * stride_qt + head * stride_qh)[:, None] + d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=is_row[:, None] & is_d[None, :], other=0.0).to(COMPUTE)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    k_ptr = kv_ptr + kv_head * (2 * PAGE_SIZE * HEAD_DIM)
    v_ptr = k_ptr + PAGE_SIZE * HEAD_DIM
    next_pages = tile_pages(table_ptr, first, stop, PAGE_SIZE, BLOCK_N)
    for n0 in tl.range(first, stop, BLOCK_N, num_stages=STAGES):
        n = n0 + tl.arange(0, BLOCK_N)
        pages = next_pages
        next_pages = tile_pages(table_ptr, n0 + BLOCK_N, stop, PAGE_SIZE, BLOCK_N)
        offsets = token_offsets(pages, n0, stride_page, PAGE_SIZE, BLOCK_N, HEAD_DIM)
        offsets = offsets[:, None] + d[None, :]
        # What lies past the context, or before every row's window, may be NaN: V must be 0 there,
        # not only its weight.
        is_token = n < stop
        if HAS_WINDOW:
            is_token &= n > context_len - num_rows - window
        is_kv = is_token[:, None] & is_d[None, :]
        k = tl.load(k_ptr + offsets, mask=is_kv, other=0.0).to(COMPUTE)
        scores = capped(tl.dot(q, k.T, input_precision="ieee"), score_factor, score_cap, HAS_CAP)
        is_seen = (n[None, :] <= position[:, None]) & (n < stop)[None, :]
        if HAS_WINDOW:
            is_seen &= n[None, :] > position[:, None] - window
        scores = tl.where(is_seen, scores, float("-inf"))
        v = tl.load(v_ptr + offsets, mask=is_kv, other=0.0).to(COMPUTE)
        row_max, row_sum, acc = softmax_step(scores, v, row_max, row_sum, acc)

    result = finish(row_sum, acc) * v_scale
    is_out = is_row[:, None] & is_d[None, :]
    if NUM_SPLITS > 1:
        tl.store(parts_ptr + part[:, None] * HEAD_DIM + d[None, :], result, mask=is_out)
        tl.store(lse_ptr + part, row_max + tl.log2(row_sum), mask=is_row)
    else:
        out_offsets = (token * stride_ot + head * stride_oh)[:, None] + d[None, :]
        tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=is_out)
