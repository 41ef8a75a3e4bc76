"""Paged attention on a CPU, native: decode steps, and bfloat16 chunks on AMX, read the pages where
they lie. Other chunks: one gather, then torch's fused attention.

Specification: ``kernels/reference/paged_attention``. Measured on one core of two, bfloat16, against
gather and fused attention. Decode, 3 KV heads of 64 with 3 query heads each: 39 us to 63 us for one
request of 190 tokens, 1.1 ms to 2.3 ms for eight of 1,000. Chunks, busy core, 4 KV heads of 64 with
3 query heads each: 0.37 ms to 0.98 ms for 256 tokens, 4.4 ms to 8.8 ms for 1,024.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from pdx.kernels.cpu.native_ops import NATIVE_DTYPES, has_amx, native_ops
from pdx.kernels.paged_batch import PagedBatch, PagedSpan

__all__ = ["paged_attention", "paged_attention_without_amx"]

_SHAPE_STEP = 64


def paged_attention(q: Tensor, kv: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """q [T, Hq, D], kv [P, Hkv, 2, S, D] (one layer, appended) -> [T, Hq, D] in q's dtype."""
    return _paged_attention(q, kv, batch, scale, _chunk_on_amx)


def paged_attention_without_amx(q: Tensor, kv: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """The same on any CPU."""
    return _paged_attention(q, kv, batch, scale, lambda q, kv, out, span, scale: False)


def _paged_attention(
    q: Tensor, kv: Tensor, batch: PagedBatch, scale: float, chunk: Callable[..., bool]
) -> Tensor:
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    by_span = batch.chunks if _decode(q, kv, out, batch, scale) else batch.spans
    by_head = kv.permute(1, 2, 0, 3, 4)  # [Hkv, 2, P, S, D]
    for span in by_span:
        if not chunk(q[span.rows], kv, out[span.rows], span, scale):
            out[span.rows] = _attend(q[span.rows], by_head, span, scale)
    return out


def _decode(q: Tensor, kv: Tensor, out: Tensor, batch: PagedBatch, scale: float) -> bool:
    """Fill the decode steps' rows of ``out``; False: not a shape or dtype of the native code."""
    if q.dtype not in NATIVE_DTYPES or kv.dtype != q.dtype or not kv.is_contiguous():
        return False
    _, num_kv_heads, _, page_size, head_dim = kv.shape
    steps = batch.decode_steps
    done = native_ops().pdx_decode_attention(
        q.data_ptr(),
        kv.data_ptr(),
        out.data_ptr(),
        steps.rows.data_ptr(),
        steps.context_lens.data_ptr(),
        steps.table_starts.data_ptr(),
        steps.page_indices.data_ptr(),
        len(steps),
        num_kv_heads,
        q.shape[1] // num_kv_heads,
        page_size,
        head_dim,
        scale,
        q.dtype == torch.bfloat16,
    )
    return bool(done)


def _chunk_on_amx(q: Tensor, kv: Tensor, out: Tensor, span: PagedSpan, scale: float) -> bool:
    """Fill a chunk's rows; False: no AMX, or not a shape or dtype of its code."""
    if q.dtype != torch.bfloat16 or kv.dtype != q.dtype or not kv.is_contiguous() or not has_amx():
        return False
    _, num_kv_heads, _, page_size, head_dim = kv.shape
    scratch = torch.empty(_round_up(span.context_len, 32) * head_dim, dtype=q.dtype)
    done = native_ops().pdx_chunk_attention(
        q.data_ptr(),
        kv.data_ptr(),
        out.data_ptr(),
        span.page_indices.contiguous().data_ptr(),
        scratch.data_ptr(),
        span.num_tokens,
        span.context_len,
        num_kv_heads,
        q.shape[1] // num_kv_heads,
        page_size,
        head_dim,
        scale,
    )
    return bool(done)


def _attend(q: Tensor, by_head: Tensor, span: PagedSpan, scale: float) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = by_head.shape[0]
    cached_len = span.context_len - num_tokens
    # In bfloat16 torch compiles a kernel for each shape and keeps them all: with chunks of all
    # lengths a rank grew by 60 MiB a minute. So chunks and contexts are filled up with zeros; a
    # token sees none of those, because they come after it.
    step = _SHAPE_STEP if q.dtype == torch.bfloat16 else 1
    context_len = _round_up(span.context_len, step)
    num_rows = context_len if cached_len == 0 else _round_up(num_tokens, step)
    # Whatever lies past the context is cut off, not masked: it may be NaN, and 0 * NaN is NaN.
    context = by_head.index_select(2, span.page_indices).flatten(2, 3)[:, :, : span.context_len]
    context = _filled_up(context, context_len)
    k, v = context[:, 0], context[:, 1]  # [Hkv, context_len, D]
    groups = q.view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    groups = _filled_up(groups, num_rows)
    shape = (num_kv_heads, num_heads // num_kv_heads, context_len, head_dim)
    k, v = k[:, None].expand(shape), v[:, None].expand(shape)
    if cached_len == 0:
        out = scaled_dot_product_attention(groups, k, v, is_causal=True, scale=scale)
    else:
        seen = torch.ones(num_rows, context_len, dtype=torch.bool).tril_(cached_len)
        out = scaled_dot_product_attention(groups, k, v, attn_mask=seen, scale=scale)
    return out[:, :, :num_tokens].permute(2, 0, 1, 3).reshape(q.shape)


def _filled_up(x: Tensor, num_rows: int) -> Tensor:
    """x [..., N, D] with zeros up to ``num_rows``; itself where that is N (padding by 0 copies)."""
    missing = num_rows - x.shape[-2]
    return pad(x, (0, 0, 0, missing)) if missing else x


def _round_up(length: int, step: int) -> int:
    return -(-length // step) * step
