"""Paged attention on a CPU, native: requests that decode, and bfloat16 chunks on AMX, read the
pages where they lie. Other chunks: one gather, then torch's fused attention. Windows, soft caps and
float8 memory take the reference.

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

from pdx.kernels.batch import ForwardBatch, RequestGroup
from pdx.kernels.cpu.native_ops import NATIVE_DTYPES, has_amx, native_ops
from pdx.kernels.reference.paged_attention import paged_attention as reference

__all__ = ["paged_attention", "paged_attention_without_amx"]

_SHAPE_STEP = 64


def paged_attention(
    q: Tensor,
    kv: Tensor,
    batch: ForwardBatch,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """q [T, Hq, D], kv [P, Hkv, 2, S, D] (one layer, appended) -> [T, Hq, D] in q's dtype."""
    if window is not None or soft_cap is not None or kv.dtype != q.dtype or kv_scales != (1.0, 1.0):
        return reference(q, kv, batch, scale, window=window, soft_cap=soft_cap, kv_scales=kv_scales)
    return _paged_attention(q, kv, batch, scale, _chunk_on_amx)


def paged_attention_without_amx(q: Tensor, kv: Tensor, batch: ForwardBatch, scale: float) -> Tensor:
    """The same on any CPU."""
    return _paged_attention(q, kv, batch, scale, lambda q, kv, out, pages, seq_len, scale: False)


def _paged_attention(
    q: Tensor, kv: Tensor, batch: ForwardBatch, scale: float, chunk: Callable[..., bool]
) -> Tensor:
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    # The rows of requests that decode are the first ones.
    groups: tuple[RequestGroup, ...] = batch.groups
    if _decode(q, kv, out, batch.decodes, scale):
        groups = (batch.chunks,)
    if not any(map(len, groups)):
        return out
    by_head = kv.permute(1, 2, 0, 3, 4)  # [Hkv, 2, P, S, D]
    for group in groups:
        queries, results = q[group.rows], out[group.rows]
        for rows, seq_len, pages in group.each(kv.shape[3]):
            if not chunk(queries[rows], kv, results[rows], pages, seq_len, scale):
                results[rows] = _attend(queries[rows], by_head, pages, seq_len, scale)
    return out


def _decode(q: Tensor, kv: Tensor, out: Tensor, group: RequestGroup, scale: float) -> bool:
    """Fill the rows of requests that decode; False: not a shape or dtype of the native code."""
    if q.dtype not in NATIVE_DTYPES or not kv.is_contiguous():
        return False
    _, num_kv_heads, _, page_size, head_dim = kv.shape
    done = native_ops().pdx_decode_attention(
        q.data_ptr(),
        kv.data_ptr(),
        out.data_ptr(),
        group.query_starts.data_ptr(),
        group.query_lens.data_ptr(),
        group.seq_lens.data_ptr(),
        group.table_starts.data_ptr(),
        group.page_tables.data_ptr(),
        len(group),
        num_kv_heads,
        q.shape[1] // num_kv_heads,
        page_size,
        head_dim,
        scale,
        q.dtype == torch.bfloat16,
    )
    return bool(done)


def _chunk_on_amx(
    q: Tensor, kv: Tensor, out: Tensor, pages: Tensor, seq_len: int, scale: float
) -> bool:
    """Fill a chunk's rows; False: no AMX, or not a shape or dtype of its code."""
    if q.dtype != torch.bfloat16 or not kv.is_contiguous() or not has_amx():
        return False
    _, num_kv_heads, _, page_size, head_dim = kv.shape
    scratch = torch.empty(_round_up(seq_len, 32) * head_dim, dtype=q.dtype)
    done = native_ops().pdx_chunk_attention(
        q.data_ptr(),
        kv.data_ptr(),
        out.data_ptr(),
        pages.data_ptr(),
        scratch.data_ptr(),
        len(q),
        seq_len,
        num_kv_heads,
        q.shape[1] // num_kv_heads,
        page_size,
        head_dim,
        scale,
    )
    return bool(done)


def _attend(q: Tensor, by_head: Tensor, pages: Tensor, seq_len: int, scale: float) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = by_head.shape[0]
    cached_len = seq_len - num_tokens
    # In bfloat16 torch compiles a kernel for each shape and keeps them all: with chunks of all
    # lengths a rank grew by 60 MiB a minute. So chunks and contexts are filled up with zeros; a
    # token sees none of those, because they come after it.
    step = _SHAPE_STEP if q.dtype == torch.bfloat16 else 1
    context_len = _round_up(seq_len, step)
    num_rows = context_len if cached_len == 0 else _round_up(num_tokens, step)
    # Whatever lies past the sequence is cut off, not masked: it may be NaN, and 0 * NaN is NaN.
    context = by_head.index_select(2, pages).flatten(2, 3)[:, :, :seq_len]
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
