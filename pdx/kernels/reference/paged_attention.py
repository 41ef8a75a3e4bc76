"""Causal attention over the paged KV of each request: softmax(q k^T scale) v.

The rows of a request are its last tokens: row j of n sees the first seq_len - n + j + 1 tokens.
One rule for a decode step (n = 1), a chunk after cached tokens, and a whole prompt. Query head h
reads KV head h // (Hq / Hkv). With a window, a row sees only the last ``window`` of its tokens; a
soft cap c bends the scores: c tanh(score / c). Nothing past seq_len is read, so unwritten
memory may hold anything. Source: Vaswani et al. 2017; grouped heads: Ainslie et al. 2023; pages:
Kwon et al. 2023; soft cap: Gemma team 2024, "Gemma 2".
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.batch import ForwardBatch
from pdx.kernels.reference.accumulate import widen

__all__ = ["paged_attention"]


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
    """q [T, Hq, D], kv [P, Hkv, 2, S, D] (one layer, appended) -> [T, Hq, D] in q's dtype.

    ``kv_scales``: what a stored K, and a stored V, of 1 means.
    """
    out = torch.empty_like(q)
    k_scale, v_scale = kv_scales
    for group in batch.groups:
        queries, results = q[group.rows], out[group.rows]
        for rows, seq_len, pages in group.each(kv.shape[3]):
            context = kv[pages].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :seq_len]
            attended = _attend(queries[rows], context, scale * k_scale, window, soft_cap)
            results[rows] = attended * v_scale
    return out


def _attend(
    q: Tensor, context: Tensor, scale: float, window: int | None, soft_cap: float | None
) -> Tensor:
    """q [n, Hq, D], context [2, Hkv, seq_len, D]."""
    num_rows, seq_len = len(q), context.shape[2]
    num_groups = q.shape[1] // context.shape[1]
    k, v = widen(context).repeat_interleave(num_groups, dim=1)  # [Hq, seq_len, D] each
    scores = torch.einsum("thd,hcd->htc", widen(q), k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    last_seen = torch.arange(seq_len - num_rows, seq_len)[:, None]
    tokens = torch.arange(seq_len)[None, :]
    unseen = tokens > last_seen
    if window is not None:
        unseen |= tokens <= last_seen - window
    weights = torch.softmax(scores.masked_fill(unseen, float("-inf")), dim=-1)
    return torch.einsum("htc,hcd->thd", weights, v).to(q.dtype)
