"""Absorbed MLA attention over pages of float8 records: decode and drafts on sm_90 and up.

Specification: ``kernels/reference/mla_attention`` of ``kernels/reference/mla_record``'s numbers.

The conversions are what such a kernel waits for. A tile is turned into float16, exact and two
values an instruction, and scaled there: without the product, the compiler would keep the tile as
bytes and pick each of them for the second matrix product. Tiles are not copied ahead: the blocks of
a multiprocessor hide one another's loads. Otherwise as ``mla_decode``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels import decisions
from pdx.kernels.attention_tiles import LOG2_E, split_range, tile_pages, token_offsets
from pdx.kernels.batch import RequestGroup
from pdx.kernels.merge_splits import Splits, merge_splits
from pdx.kernels.mla_record import LatentParts

__all__ = ["mla_decode_float8"]

#: A tile holds so many times the latents: float16 then holds the scales of quarters well whose
#: largest value is between 0.01 and 16,000. A power of 2; queries are divided by it.
_TILE_FACTOR = 4.0


def mla_decode_float8(
    q: Tensor,
    kv: Tensor,
    group: RequestGroup,
    scale: float,
    latent_dim: int,
    *,
    num_splits: int | None = None,
) -> Tensor:
    """q [T, Hq, R + E], kv uint8 [P, S, record] (one layer, appended) -> [T, Hq, R] as q.

    R = ``latent_dim`` is a power of 2 from 64 on, E one from 16 on. ``num_splits``: parts of a
    context; chosen from the launch's size where it is None.
    """
    num_heads, width = q.shape[1:]
    assert q.stride(2) == 1
    out = q.new_empty(q.shape[0], num_heads, latent_dim)
    if not len(group) or not group.max_query_len:
        return out
    most_rows = num_heads * group.max_query_len
    config = decisions.mla_decode_config(decisions.arch_of(q.device), most_rows, kv.dtype)
    num_blocks = -(-most_rows // config.block_m)
    if num_splits is None:
        num_splits = decisions.num_splits_for(len(group) * num_blocks, group.max_seq_len, q.device)
    splits = Splits.empty(group, num_heads, num_splits, latent_dim) if num_splits > 1 else None
    parts = LatentParts.of(kv, latent_dim)
    _kernel[(len(group), num_blocks, num_splits)](
        q,
        parts.latent,
        parts.scale,
        parts.rope,
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
        parts.latent.stride(0),
        parts.scale.stride(0),
        parts.rope.stride(0),
        NUM_HEADS=num_heads,
        MAX_ROWS=group.max_query_len,
        QUARTER=latent_dim // 4,
        ROPE=width - latent_dim,
        RECORD=kv.shape[2],
        PAGE_SIZE=kv.shape[1],
        TILE_FACTOR=_TILE_FACTOR,
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
    latent_ptr,
    scale_ptr,
    rope_ptr,
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
    stride_latent,
    stride_scale,
    stride_rope,
    NUM_HEADS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    QUARTER: tl.constexpr,
    ROPE: tl.constexpr,
    RECORD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_FACTOR: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    LATENT: tl.constexpr = 4 * QUARTER
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

    c = tl.arange(0, QUARTER)[None, :]
    r = tl.arange(0, ROPE)[None, :]
    is_q = is_row[:, None]
    token = (tl.load(row_starts_ptr + request) + row).to(tl.int64)
    rows = q_ptr + (token * stride_qt + head * stride_qh)[:, None]
    q0 = (tl.load(rows + c, mask=is_q, other=0.0) / TILE_FACTOR).to(tl.float16)
    q1 = (tl.load(rows + QUARTER + c, mask=is_q, other=0.0) / TILE_FACTOR).to(tl.float16)
    q2 = (tl.load(rows + 2 * QUARTER + c, mask=is_q, other=0.0) / TILE_FACTOR).to(tl.float16)
    q3 = (tl.load(rows + 3 * QUARTER + c, mask=is_q, other=0.0) / TILE_FACTOR).to(tl.float16)
    q_rope = tl.load(rows + LATENT + r, mask=is_q, other=0.0).to(tl.bfloat16)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc0 = tl.zeros((BLOCK_M, QUARTER), tl.float32)
    acc1 = tl.zeros((BLOCK_M, QUARTER), tl.float32)
    acc2 = tl.zeros((BLOCK_M, QUARTER), tl.float32)
    acc3 = tl.zeros((BLOCK_M, QUARTER), tl.float32)
    next_pages = tile_pages(table_ptr, first, stop, PAGE_SIZE, BLOCK_N)
    for n0 in tl.range(first, stop, BLOCK_N, num_stages=STAGES):
        n = n0 + tl.arange(0, BLOCK_N)
        pages = next_pages
        next_pages = tile_pages(table_ptr, n0 + BLOCK_N, stop, PAGE_SIZE, BLOCK_N)
        # What lies past the context may be NaN: values must be 0 there, not only their weights.
        is_n = n < stop
        is_kv = is_n[:, None]
        at = scale_ptr + token_offsets(pages, n0, stride_scale, PAGE_SIZE, BLOCK_N, RECORD // 4)
        s0 = (tl.load(at, mask=is_n, other=0.0) * TILE_FACTOR).to(tl.float16)[:, None]
        s1 = (tl.load(at + 1, mask=is_n, other=0.0) * TILE_FACTOR).to(tl.float16)[:, None]
        s2 = (tl.load(at + 2, mask=is_n, other=0.0) * TILE_FACTOR).to(tl.float16)[:, None]
        s3 = (tl.load(at + 3, mask=is_n, other=0.0) * TILE_FACTOR).to(tl.float16)[:, None]
        at = latent_ptr + token_offsets(
            pages, n0, stride_latent, PAGE_SIZE, BLOCK_N, RECORD
        )[:, None]  # fmt: skip
        c0 = tl.load(at + c, mask=is_kv, other=0.0).to(tl.float16) * s0
        c1 = tl.load(at + QUARTER + c, mask=is_kv, other=0.0).to(tl.float16) * s1
        c2 = tl.load(at + 2 * QUARTER + c, mask=is_kv, other=0.0).to(tl.float16) * s2
        c3 = tl.load(at + 3 * QUARTER + c, mask=is_kv, other=0.0).to(tl.float16) * s3
        at = rope_ptr + token_offsets(
            pages, n0, stride_rope, PAGE_SIZE, BLOCK_N, RECORD // 2
        )[:, None]  # fmt: skip
        rope = tl.load(at + r, mask=is_kv, other=0.0)
        scores = tl.dot(q_rope, rope.T)
        scores = tl.dot(q0, c0.T, scores)
        scores = tl.dot(q1, c1.T, scores)
        scores = tl.dot(q2, c2.T, scores)
        scores = tl.dot(q3, c3.T, scores)
        is_seen = (n[None, :] <= position[:, None]) & is_n[None, :]
        scores = tl.where(is_seen, scores * score_factor, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        row_max = new_max
        weights, decay = weights.to(tl.float16), decay[:, None]
        acc0 = tl.dot(weights, c0, acc0 * decay)
        acc1 = tl.dot(weights, c1, acc1 * decay)
        acc2 = tl.dot(weights, c2, acc2 * decay)
        acc3 = tl.dot(weights, c3, acc3 * decay)

    factor = 1.0 / (TILE_FACTOR * tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
    if NUM_SPLITS > 1:
        to = parts_ptr + part[:, None] * LATENT + c
        tl.store(lse_ptr + part, row_max + tl.log2(row_sum), mask=is_row)
    else:
        to = out_ptr + (token * stride_ot + head * stride_oh)[:, None] + c
    tl.store(to, (acc0 * factor).to(to.dtype.element_ty), mask=is_q)
    tl.store(to + QUARTER, (acc1 * factor).to(to.dtype.element_ty), mask=is_q)
    tl.store(to + 2 * QUARTER, (acc2 * factor).to(to.dtype.element_ty), mask=is_q)
    tl.store(to + 3 * QUARTER, (acc3 * factor).to(to.dtype.element_ty), mask=is_q)
