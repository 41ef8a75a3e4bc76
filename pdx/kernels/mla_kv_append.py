"""The MLA append: a token's latent and its rotated key to their page, as they are or as a record.

Specification: ``kernels/reference/rope`` and ``kernels/reference/mla_record``. After this launch
the layer's KV is final; ``progress_word`` may say so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.mla_record import FLOAT8_MAX, NUM_SCALES, LatentParts

__all__ = ["mla_kv_append"]


def mla_kv_append(
    latent: Tensor,
    k_rope: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    token_pages: Tensor,
    token_offsets: Tensor,
    *,
    interleaved: bool = True,
) -> None:
    """latent [T, R] and k_rope [T, E] into kv [P, S, R + E], or uint8 [P, S, record].

    Args:
        latent: after its norm; may be strided, like k_rope (views of one projection).
        k_rope: is turned before it is stored.
        cos: float32 [T, E/2], of the angles.
        sin: likewise.
        kv: one layer. All but the tokens' places stays.
        token_pages: int [T]; a token whose page is negative is padding and is not stored.
        token_offsets: int [T], places in the pages.
        interleaved: pairs are (x[2i], x[2i+1]), as DeepSeek's weights have them; else (x[i],
            x[i + E/2]).
    """
    (num_tokens, latent_dim), rope_dim = latent.shape, k_rope.shape[1]
    assert latent.stride(1) == k_rope.stride(1) == cos.stride(1) == sin.stride(1) == 1
    parts = LatentParts.of(kv, latent_dim)
    if num_tokens:
        _kernel[(num_tokens,)](
            latent,
            k_rope,
            cos,
            sin,
            parts.latent,
            parts.scale,
            parts.rope,
            token_pages,
            token_offsets,
            latent.stride(0),
            k_rope.stride(0),
            cos.stride(0),
            sin.stride(0),
            *parts.latent.stride()[:2],
            *parts.scale.stride()[:2],
            *parts.rope.stride()[:2],
            QUARTER=latent_dim // NUM_SCALES,
            NUM_SCALES=NUM_SCALES,
            HALF=rope_dim // 2,
            IS_RECORD=kv.dtype == torch.uint8,
            IS_INTERLEAVED=interleaved,
            FLOAT8_MAX=FLOAT8_MAX,
            num_warps=4,
        )


@triton.jit
def _kernel(
    latent_ptr,
    k_rope_ptr,
    cos_ptr,
    sin_ptr,
    to_latent_ptr,
    to_scale_ptr,
    to_rope_ptr,
    token_pages_ptr,
    token_offsets_ptr,
    stride_lt,
    stride_rt,
    stride_cos,
    stride_sin,
    stride_lp,
    stride_ls,
    stride_sp,
    stride_ss,
    stride_rp,
    stride_rs,
    QUARTER: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    HALF: tl.constexpr,
    IS_RECORD: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    FLOAT8_MAX: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    page = tl.load(token_pages_ptr + token).to(tl.int64)
    if page < 0:
        return
    place = tl.load(token_offsets_ptr + token).to(tl.int64)

    quarter = tl.arange(0, NUM_SCALES)
    columns = quarter[:, None] * QUARTER + tl.arange(0, QUARTER)[None, :]
    latent = tl.load(latent_ptr + token * stride_lt + columns)
    if IS_RECORD:
        latent = latent.to(tl.float32)
        largest = tl.max(tl.abs(latent), 1)
        scale = tl.where(largest == 0.0, 1.0, largest / FLOAT8_MAX)
        latent = latent / scale[:, None]
        tl.store(to_scale_ptr + page * stride_sp + place * stride_ss + quarter, scale)
    to_latent = to_latent_ptr + page * stride_lp + place * stride_ls
    tl.store(to_latent + columns, latent.to(to_latent_ptr.dtype.element_ty))

    i = tl.arange(0, HALF)
    if IS_INTERLEAVED:
        first, second = 2 * i, 2 * i + 1
    else:
        first, second = i, i + HALF
    cos = tl.load(cos_ptr + token * stride_cos + i)
    sin = tl.load(sin_ptr + token * stride_sin + i)
    x = tl.load(k_rope_ptr + token * stride_rt + first).to(tl.float32)
    y = tl.load(k_rope_ptr + token * stride_rt + second).to(tl.float32)
    to_rope = to_rope_ptr + page * stride_rp + place * stride_rs
    tl.store(to_rope + first, (x * cos - y * sin).to(to_rope_ptr.dtype.element_ty))
    tl.store(to_rope + second, (y * cos + x * sin).to(to_rope_ptr.dtype.element_ty))
