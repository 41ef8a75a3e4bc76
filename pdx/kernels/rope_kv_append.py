"""Rotary positions and the paged KV append in one launch: q and k turn, k and v go to their pages.

Specification: ``kernels/reference/rope`` and ``kernels/reference/kv_append``. After this launch the
layer's KV is final; ``progress_word`` may say so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.attention_tiles import next_power_of_2

__all__ = ["rope", "rope_kv_append"]

#: Heads of one program.
_BLOCK_H = 16


def rope_kv_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    token_pages: Tensor,
    token_offsets: Tensor,
    *,
    interleaved: bool = False,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """q [T, Hq, D] turned; k and v [T, Hkv, D] into kv [P, Hkv, 2, S, D] (one layer).

    Args:
        q: may be strided, like k and v (views of one projection); Hq may be 0.
        k: turned before it is stored.
        v: stored as it is.
        cos: float32 [T, D/2], of the angles.
        sin: likewise.
        kv: in the dtype of k, or float8_e4m3fn, which holds k / ``kv_scales[0]`` and v /
            ``kv_scales[1]``. All but the tokens' places stays.
        token_pages: int [T]; a token whose page is negative is padding and is not stored.
        token_offsets: int [T], places in the pages.
        interleaved: pairs are (x[2i], x[2i+1]), not (x[i], x[i + D/2]).
        kv_scales: what a stored K, and a stored V, of 1 means.
    """
    return _launch(q, k, v, cos, sin, kv, token_pages, token_offsets, interleaved, kv_scales)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """What ``rope_kv_append`` does to q, alone: x [T, H, D] turned."""
    num_tokens, _, head_dim = x.shape
    no_heads = x[:, :0]
    no_kv = x.new_empty(1, 0, 2, 1, head_dim)
    no_places = cos.new_empty(num_tokens, dtype=torch.int32)
    return _launch(
        x, no_heads, no_heads, cos, sin, no_kv, no_places, no_places, interleaved, (1.0, 1.0)
    )


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    token_pages: Tensor,
    token_offsets: Tensor,
    interleaved: bool,
    kv_scales: tuple[float, float],
) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = kv.shape[1], kv.shape[3]
    assert q.stride(2) == k.stride(2) == v.stride(2) == cos.stride(1) == sin.stride(1) == 1
    assert kv.stride()[1:] == (2 * page_size * head_dim, page_size * head_dim, head_dim, 1)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    block_h = min(_BLOCK_H, next_power_of_2(max(num_heads, num_kv_heads)))
    num_kv_blocks = -(-num_kv_heads // block_h)
    grid = (num_tokens, num_kv_blocks + -(-num_heads // block_h))
    if num_tokens:
        _kernel[grid](
            q,
            k,
            v,
            cos,
            sin,
            kv,
            token_pages,
            token_offsets,
            out,
            1 / kv_scales[0],
            1 / kv_scales[1],
            num_heads,
            num_kv_heads,
            num_kv_blocks,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            cos.stride(0),
            sin.stride(0),
            kv.stride(0),
            HALF=head_dim // 2,
            BLOCK_HALF=next_power_of_2(head_dim // 2),
            BLOCK_H=block_h,
            PAGE_SIZE=page_size,
            IS_INTERLEAVED=interleaved,
            num_warps=4,
        )
    return out


@triton.jit
def _kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    kv_ptr,
    token_pages_ptr,
    token_offsets_ptr,
    out_ptr,
    k_factor,
    v_factor,
    num_heads,
    num_kv_heads,
    num_kv_blocks,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_cos,
    stride_sin,
    stride_page,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    HEAD_DIM: tl.constexpr = 2 * HALF
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK_HALF)
    if IS_INTERLEAVED:
        first, second = 2 * i, 2 * i + 1
    else:
        first, second = i, i + HALF
    cos = tl.load(cos_ptr + token * stride_cos + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * stride_sin + i, mask=i < HALF, other=0.0)[None, :]

    if block >= num_kv_blocks:
        head = (block - num_kv_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        is_x = (head < num_heads)[:, None] & (i < HALF)[None, :]
        rows = q_ptr + (token * stride_qt + head * stride_qh)[:, None]
        x = tl.load(rows + first[None, :], mask=is_x, other=0.0).to(tl.float32)
        y = tl.load(rows + second[None, :], mask=is_x, other=0.0).to(tl.float32)
        out = out_ptr + ((token * num_heads + head) * HEAD_DIM)[:, None]
        tl.store(out + first[None, :], (x * cos - y * sin).to(out_ptr.dtype.element_ty), mask=is_x)
        tl.store(out + second[None, :], (y * cos + x * sin).to(out_ptr.dtype.element_ty), mask=is_x)
        return

    page = tl.load(token_pages_ptr + token).to(tl.int64)
    if page < 0:
        return
    head = block * BLOCK_H + tl.arange(0, BLOCK_H)
    is_x = (head < num_kv_heads)[:, None] & (i < HALF)[None, :]
    place = tl.load(token_offsets_ptr + token) * HEAD_DIM
    to = kv_ptr + page * stride_page + (head * (2 * PAGE_SIZE * HEAD_DIM) + place)[:, None]
    rows = k_ptr + (token * stride_kt + head * stride_kh)[:, None]
    x = tl.load(rows + first[None, :], mask=is_x, other=0.0).to(tl.float32)
    y = tl.load(rows + second[None, :], mask=is_x, other=0.0).to(tl.float32)
    # Rounded to k's dtype first, as the specification has it, also where float8 is stored.
    turned = ((x * cos - y * sin).to(k_ptr.dtype.element_ty)).to(tl.float32) * k_factor
    tl.store(to + first[None, :], turned.to(kv_ptr.dtype.element_ty), mask=is_x)
    turned = ((y * cos + x * sin).to(k_ptr.dtype.element_ty)).to(tl.float32) * k_factor
    tl.store(to + second[None, :], turned.to(kv_ptr.dtype.element_ty), mask=is_x)
    to += PAGE_SIZE * HEAD_DIM
    rows = v_ptr + (token * stride_vt + head * stride_vh)[:, None]
    x = tl.load(rows + i[None, :], mask=is_x, other=0.0).to(tl.float32) * v_factor
    y = tl.load(rows + (i + HALF)[None, :], mask=is_x, other=0.0).to(tl.float32) * v_factor
    tl.store(to + i[None, :], x.to(kv_ptr.dtype.element_ty), mask=is_x)
    tl.store(to + (i + HALF)[None, :], y.to(kv_ptr.dtype.element_ty), mask=is_x)
