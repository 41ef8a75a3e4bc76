"""Causal MLA attention of a chunk's rows, not absorbed: keys and values of each head were made.

For long chunks this costs a third of the absorbed form: 192-wide keys and 128-wide values in place
of 576 and 512. Specification: ``kernels/reference/mla_attention``. Structure as ``paged_prefill``;
keys and values lie one context after the other, the rotated part of a key is shared by the heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels import decisions
from pdx.kernels.attention_tiles import LOG2_E, finish, softmax_step
from pdx.kernels.batch import RequestGroup

__all__ = ["mla_prefill"]


def mla_prefill(
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    v: Tensor,
    group: RequestGroup,
    scale: float,
) -> Tensor:
    """q [T, Hq, N + E], k_nope [C, Hq, N], k_rope [C, E], v [C, Hq, V] -> [T, Hq, V] as q.

    Args:
        q: may be strided, like the others (k_nope and v are views of one projection).
        k_nope: the keys' parts without a position.
        k_rope: the parts with one, turned, of all heads.
        v: the values. N, E and V are powers of 2 from 16 on.
        group: the requests, whose sequences lie in C as ``seq_starts`` says; of their pages nothing
            is read.
        scale: of the scores.
    """
    num_heads, nope, rope, v_dim = q.shape[1], k_nope.shape[2], k_rope.shape[1], v.shape[2]
    assert q.shape[2] == nope + rope and q.stride(2) == k_nope.stride(2) == v.stride(2) == 1
    assert k_rope.stride(1) == 1
    out = q.new_empty(q.shape[0], num_heads, v_dim)
    if not len(group) or not group.max_query_len:
        return out
    config = decisions.prefill_config(decisions.arch_of(q.device), v_dim, q.dtype)
    grid = (-(-group.max_query_len // config.block_m), num_heads, len(group))
    _kernel[grid](
        q,
        k_nope,
        k_rope,
        v,
        out,
        group.query_starts,
        group.query_lens,
        group.seq_lens,
        group.seq_starts,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        k_nope.stride(0),
        k_nope.stride(1),
        k_rope.stride(0),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        out.stride(1),
        NOPE=nope,
        ROPE=rope,
        V_DIM=v_dim,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=2,
        num_warps=config.num_warps,
    )
    return out


@triton.jit
def _kernel(
    q_ptr,
    k_nope_ptr,
    k_rope_ptr,
    v_ptr,
    out_ptr,
    row_starts_ptr,
    num_rows_ptr,
    context_lens_ptr,
    context_starts_ptr,
    score_factor,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_rt,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    head, request = tl.program_id(1), tl.program_id(2)
    # The last tokens see most: they start first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    num_rows = tl.load(num_rows_ptr + request)
    if first_row >= num_rows:
        return
    context_len = tl.load(context_lens_ptr + request)
    row = first_row + tl.arange(0, BLOCK_M)
    is_row = (row < num_rows)[:, None]
    position = context_len - num_rows + row
    nope, rope, value = tl.arange(0, NOPE), tl.arange(0, ROPE), tl.arange(0, V_DIM)
    token = (tl.load(row_starts_ptr + request) + row).to(tl.int64)
    rows = q_ptr + (token * stride_qt + head * stride_qh)[:, None]
    q_nope = tl.load(rows + nope[None, :], mask=is_row, other=0.0)
    q_rope = tl.load(rows + (NOPE + rope)[None, :], mask=is_row, other=0.0)

    start = tl.load(context_starts_ptr + request).to(tl.int64)
    k_nope_ptr += start * stride_kt + head * stride_kh
    k_rope_ptr += start * stride_rt
    v_ptr += start * stride_vt + head * stride_vh
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, V_DIM), tl.float32)
    first_position = context_len - num_rows + first_row
    whole = (first_position + 1) // BLOCK_N * BLOCK_N
    stop = tl.minimum(first_position + BLOCK_M, context_len)
    row_max, row_sum, acc = _attend(
        q_nope, q_rope, k_nope_ptr, k_rope_ptr, v_ptr, 0, whole, stop, position,
        stride_kt, stride_rt, stride_vt, score_factor, row_max, row_sum, acc,
        False, NOPE, ROPE, V_DIM, BLOCK_N, STAGES,
    )  # fmt: skip
    row_max, row_sum, acc = _attend(
        q_nope, q_rope, k_nope_ptr, k_rope_ptr, v_ptr, whole, stop, stop, position,
        stride_kt, stride_rt, stride_vt, score_factor, row_max, row_sum, acc,
        True, NOPE, ROPE, V_DIM, BLOCK_N, 1,
    )  # fmt: skip
    out = out_ptr + (token * stride_ot + head * stride_oh)[:, None] + value[None, :]
    tl.store(out, finish(row_sum, acc).to(out_ptr.dtype.element_ty), mask=is_row)


@triton.jit
def _attend(
    q_nope,
    q_rope,
    k_nope_ptr,
    k_rope_ptr,
    v_ptr,
    first,
    last,
    stop,
    position,
    stride_kt,
    stride_rt,
    stride_vt,
    score_factor,
    row_max,
    row_sum,
    acc,
    IS_MASKED: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The tiles from ``first`` to ``last``; ``stop`` is the end of what any row sees."""
    nope, rope, value = tl.arange(0, NOPE), tl.arange(0, ROPE), tl.arange(0, V_DIM)
    for n0 in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = n0 + tl.arange(0, BLOCK_N)
        wide = n.to(tl.int64)[:, None]
        is_kv = (n >= 0)[:, None]
        if IS_MASKED:
            is_kv = (n < stop)[:, None]
        k = tl.load(k_nope_ptr + wide * stride_kt + nope[None, :], mask=is_kv, other=0.0)
        scores = tl.dot(q_nope, k.T, input_precision="ieee")
        k = tl.load(k_rope_ptr + wide * stride_rt + rope[None, :], mask=is_kv, other=0.0)
        scores = tl.dot(q_rope, k.T, scores, input_precision="ieee") * score_factor
        if IS_MASKED:
            scores = tl.where(n[None, :] <= position[:, None], scores, float("-inf"))
        v = tl.load(v_ptr + wide * stride_vt + value[None, :], mask=is_kv, other=0.0)
        row_max, row_sum, acc = softmax_step(scores, v, row_max, row_sum, acc)
    return row_max, row_sum, acc
