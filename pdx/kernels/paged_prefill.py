"""Causal attention of a chunk's rows over their paged context, cached tokens and new ones.

Row j of n sees the first context_len - n + j + 1 tokens (with a window, the last ``window`` of
those): softmax(cap(q k^T scale)) v. Specification: ``kernels/reference/paged_attention``.

A program takes a tile of consecutive tokens of one request, with all query heads of one KV head as
further rows of the same matrix product. Tiles of the context that every row sees whole run without
masks; the heaviest tiles of rows start first. Source: Dao 2023, "FlashAttention-2".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels import decisions
from pdx.kernels.attention_tiles import (
    ScoreScale,
    capped,
    finish,
    next_power_of_2,
    softmax_step,
    tile_pages,
    token_offsets,
)
from pdx.kernels.batch import RequestGroup
from pdx.kernels.kv_view import check_kv
from pdx.kernels.triton_dtypes import compute_dtype

__all__ = ["paged_prefill"]


def paged_prefill(
    q: Tensor,
    kv: Tensor,
    group: RequestGroup,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    out: Tensor | None = None,
) -> Tensor:
    """q [T, Hq, D], kv [P, Hkv, 2, S, D] (one layer, appended) -> [T, Hq, D] in q's dtype.

    Args:
        q: the pass's queries; its rows may be strided.
        kv: in q's dtype, or float8_e4m3fn (sm_90 and up) that ``kv_scales`` turn into numbers.
        group: the requests; only their rows of the result are written.
        scale: of the scores.
        window: how many tokens a row sees at most, its own included.
        soft_cap: of the scores' size.
        kv_scales: what a stored K, and a stored V, of 1 means.
        out: the result's memory, where another kernel fills other rows of it.
    """
    check_kv(q, kv)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if not len(group) or not group.max_query_len:
        return out
    num_kv_heads, page_size, head_dim = kv.shape[1], kv.shape[3], kv.shape[4]
    num_groups = q.shape[1] // num_kv_heads
    config = decisions.prefill_config(decisions.arch_of(q.device), head_dim, kv.dtype)
    score = ScoreScale.of(scale * kv_scales[0], soft_cap)
    num_tiles = -(-group.max_query_len // (config.block_m // num_groups))
    _kernel[(num_tiles, num_kv_heads, len(group))](
        q,
        kv,
        out,
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
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        COMPUTE=compute_dtype(q, kv),
        HAS_CAP=soft_cap is not None,
        HAS_WINDOW=window is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=next_power_of_2(head_dim),
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    return out


@triton.jit
def _kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
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
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    COMPUTE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_M // NUM_GROUPS
    kv_head, request = tl.program_id(1), tl.program_id(2)
    # The last tokens see most: they start first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS
    num_rows = tl.load(num_rows_ptr + request)
    if first_row >= num_rows:
        return
    context_len = tl.load(context_lens_ptr + request)
    table_ptr = page_indices_ptr + tl.load(table_starts_ptr + request)

    # Matrix row m is token first_row + m // NUM_GROUPS, query head m % NUM_GROUPS of the KV head.
    m = tl.arange(0, BLOCK_M)
    row, head = first_row + m // NUM_GROUPS, kv_head * NUM_GROUPS + m % NUM_GROUPS
    is_row = (row < num_rows) & (m < TOKENS * NUM_GROUPS)
    position = context_len - num_rows + row
    d = tl.arange(0, BLOCK_D)
    is_out = is_row[:, None] & (d < HEAD_DIM)[None, :]
    token = (tl.load(row_starts_ptr + request) + row).to(tl.int64)
    q_offsets = (token * stride_qt + head * stride_qh)[:, None] + d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=is_out, other=0.0).to(COMPUTE)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    # [begin, whole): the window starts here. [whole, partial): all rows see it. Then: some do.
    first_position = context_len - num_rows + first_row
    stop = tl.minimum(first_position + TOKENS, context_len)
    partial = (first_position + 1) // BLOCK_N * BLOCK_N
    whole, lowest = 0, 0
    if HAS_WINDOW:
        lowest = tl.maximum(first_position + 1 - window, 0)
        begin = lowest // BLOCK_N * BLOCK_N
        whole = tl.cdiv(tl.maximum(stop - window, 0), BLOCK_N) * BLOCK_N
        whole = tl.minimum(whole, tl.cdiv(stop, BLOCK_N) * BLOCK_N)
        partial = tl.maximum(partial, whole)
        row_max, row_sum, acc = _attend(
            q, kv_ptr, table_ptr, begin, whole, lowest, stop, position, kv_head, stride_page,
            score_factor, score_cap, window, row_max, row_sum, acc,
            True, HAS_CAP, HAS_WINDOW, HEAD_DIM, PAGE_SIZE, COMPUTE, BLOCK_N, BLOCK_D, STAGES,
        )  # fmt: skip
    row_max, row_sum, acc = _attend(
        q, kv_ptr, table_ptr, whole, partial, lowest, stop, position, kv_head, stride_page,
        score_factor, score_cap, window, row_max, row_sum, acc,
        False, HAS_CAP, HAS_WINDOW, HEAD_DIM, PAGE_SIZE, COMPUTE, BLOCK_N, BLOCK_D, STAGES,
    )  # fmt: skip
    row_max, row_sum, acc = _attend(
        q, kv_ptr, table_ptr, partial, stop, lowest, stop, position, kv_head, stride_page,
        score_factor, score_cap, window, row_max, row_sum, acc,
        True, HAS_CAP, HAS_WINDOW, HEAD_DIM, PAGE_SIZE, COMPUTE, BLOCK_N, BLOCK_D, 1,
    )  # fmt: skip

    result = (finish(row_sum, acc) * v_scale).to(out_ptr.dtype.element_ty)
    out_offsets = (token * stride_ot + head * stride_oh)[:, None] + d[None, :]
    tl.store(out_ptr + out_offsets, result, mask=is_out)


@triton.jit
def _attend(
    q,
    kv_ptr,
    table_ptr,
    first,
    last,
    lowest,
    stop,
    position,
    kv_head,
    stride_page,
    score_factor,
    score_cap,
    window,
    row_max,
    row_sum,
    acc,
    IS_MASKED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The tiles from ``first`` to ``last``; any row sees ``lowest`` .. ``stop`` at most."""
    d = tl.arange(0, BLOCK_D)
    k_ptr = kv_ptr + kv_head * (2 * PAGE_SIZE * HEAD_DIM)
    v_ptr = k_ptr + PAGE_SIZE * HEAD_DIM
    next_pages = tile_pages(table_ptr, first, stop, PAGE_SIZE, BLOCK_N)
    for n0 in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = n0 + tl.arange(0, BLOCK_N)
        pages = next_pages
        next_pages = tile_pages(table_ptr, n0 + BLOCK_N, stop, PAGE_SIZE, BLOCK_N)
        offsets = token_offsets(pages, n0, stride_page, PAGE_SIZE, BLOCK_N, HEAD_DIM)
        offsets = offsets[:, None] + d[None, :]
        # What lies past the context, or before every row's window, may be NaN: V must be 0 there,
        # not only its weight.
        is_token = n >= 0
        if IS_MASKED:
            is_token &= n < stop
            if HAS_WINDOW:
                is_token &= n >= lowest
        is_kv = is_token[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + offsets, mask=is_kv, other=0.0).to(COMPUTE)
        scores = capped(tl.dot(q, k.T, input_precision="ieee"), score_factor, score_cap, HAS_CAP)
        if IS_MASKED:
            is_seen = n[None, :] <= position[:, None]
            if HAS_WINDOW:
                is_seen &= n[None, :] > position[:, None] - window
            scores = tl.where(is_seen, scores, float("-inf"))
        v = tl.load(v_ptr + offsets, mask=is_kv, other=0.0).to(COMPUTE)
        row_max, row_sum, acc = softmax_step(scores, v, row_max, row_sum, acc)
    return row_max, row_sum, acc
