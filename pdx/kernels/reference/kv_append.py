"""Store the K and V of a pass's tokens: kv[page(t), :, 0, offset(t)] = k[t], and v[t] at 1."""

from __future__ import annotations

from torch import Tensor

from pdx.kernels.paged_batch import PagedBatch

__all__ = ["kv_append"]


def kv_append(k: Tensor, v: Tensor, kv: Tensor, batch: PagedBatch) -> None:
    """k, v [T, Hkv, D] into kv [P, Hkv, 2, S, D] (one layer), in place; all else in kv stays."""
    kv[batch.token_pages, :, 0, batch.token_offsets] = k
    kv[batch.token_pages, :, 1, batch.token_offsets] = v
