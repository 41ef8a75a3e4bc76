"""Attention over paged latents on a CPU, in matrix products of whole requests.

Specification: ``kernels/reference/mla_attention``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pdx.kernels.batch import RequestGroup

__all__ = ["mla_attention", "mla_prefill"]


def mla_attention(
    q: Tensor, kv: Tensor, group: RequestGroup, scale: float, latent_dim: int
) -> Tensor:
    """q [T, Hq, R + E], kv [P, S, R + E] (one layer, appended) -> [T, Hq, R] in q's dtype."""
    out = q.new_empty(*q.shape[:2], latent_dim)
    for rows, seq_len, pages in group.each(kv.shape[1]):
        # What lies past the sequence is cut off, not masked: it may be NaN.
        context = kv[pages].flatten(0, 1)[:seq_len]
        keys = context.expand(q.shape[1], *context.shape)
        attended = _attend(q[rows].transpose(0, 1), keys, keys[..., :latent_dim], scale)
        out[rows] = attended.transpose(0, 1)
    return out


def mla_prefill(
    q: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, group: RequestGroup, scale: float
) -> Tensor:
    """Not absorbed: q [T, Hq, N + E] over k_nope [C, Hq, N], k_rope [C, E], v [C, Hq, V].

    C: the sequences of the group, one after the other. -> [T, Hq, V] in q's dtype.
    """
    out = q.new_empty(*q.shape[:2], v.shape[2])
    begin = 0
    for rows, seq_len, _ in group.each(1):
        context = slice(begin, begin + seq_len)
        shared = k_rope[context, None].expand(-1, q.shape[1], -1)
        k = torch.cat([k_nope[context], shared], dim=-1)
        heads = q[rows].transpose(0, 1)
        attended = _attend(heads, k.transpose(0, 1), v[context].transpose(0, 1), scale)
        out[rows] = attended.transpose(0, 1)
        begin += seq_len
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[Hq, rows or context, ...]; the rows are the last tokens of the context."""
    num_rows, context_len = q.shape[1], k.shape[1]
    if num_rows == 1:
        return scaled_dot_product_attention(q, k, v, scale=scale)
    if num_rows == context_len:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    seen = torch.ones(num_rows, context_len, dtype=torch.bool).tril_(context_len - num_rows)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
