"""Attention over paged latents (MLA): softmax(q [c; r]^T scale) c.

A token's memory is its latent c and its rotated key r, shared by all heads; the projections from
the latent to keys and values are absorbed into q and into what follows. Rows and contexts as in
``paged_attention``. Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1 and appendix C.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.batch import RequestGroup
from pdx.kernels.reference.accumulate import widen
from pdx.kernels.reference.mla_record import unpack_records

__all__ = ["mla_attention", "mla_prefill"]


def mla_attention(
    q: Tensor, kv: Tensor, group: RequestGroup, scale: float, latent_dim: int
) -> Tensor:
    """q [T, Hq, R + E], kv [P, S, R + E] (one layer, appended) -> [T, Hq, R] in q's dtype.

    kv may be float8 records, uint8 [P, S, record].
    """
    out = torch.empty_like(q[..., :latent_dim])
    for rows, seq_len, pages in group.each(kv.shape[1]):
        context = kv[pages]
        if kv.dtype == torch.uint8:
            context = unpack_records(context, latent_dim)
        keys = context.flatten(0, 1)[:seq_len, None, :]
        out[rows] = _attend(q[rows], keys, keys[..., :latent_dim], scale)
    return out


def mla_prefill(
    q: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, group: RequestGroup, scale: float
) -> Tensor:
    """Not absorbed: q [T, Hq, N + E] over k_nope [C, Hq, N], k_rope [C, E], v [C, Hq, V].

    C: the sequences of the group, one after the other. -> [T, Hq, V] in q's dtype.
    """
    out = q.new_empty(*q.shape[:2], v.shape[2])
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, q.shape[1], -1)], dim=-1)
    begin = 0
    for rows, seq_len, _ in group.each(1):
        context = slice(begin, begin + seq_len)
        out[rows] = _attend(q[rows], k[context], v[context], scale)
        begin += seq_len
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """k [context, Hq or 1, ...]; the rows are the last tokens of the context."""
    (num_rows, num_heads), context_len = q.shape[:2], len(k)
    k, v = (widen(x).expand(-1, num_heads, -1) for x in (k, v))
    scores = torch.einsum("thd,chd->htc", widen(q), k) * scale
    last_seen = torch.arange(context_len - num_rows, context_len)[:, None]
    unseen = torch.arange(context_len)[None, :] > last_seen
    weights = torch.softmax(scores.masked_fill(unseen, float("-inf")), dim=-1)
    return torch.einsum("htc,chv->thv", weights, v).to(q.dtype)
