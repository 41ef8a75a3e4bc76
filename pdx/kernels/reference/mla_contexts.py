"""The latents and rotated keys of a pass's contexts, gathered from their pages."""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.paged_batch import PagedBatch
from pdx.kernels.reference.mla_record import unpack_records

__all__ = ["mla_contexts"]


def mla_contexts(kv: Tensor, batch: PagedBatch, latent_dim: int, dtype: torch.dtype) -> Tensor:
    """The spans' contexts, one after the other.

    Args:
        kv: [P, S, R + E] (one layer), or float8 records, uint8 [P, S, record].
        latent_dim: R.
        dtype: of the result.

    Returns:
        [C, R + E].
    """
    contexts = [kv[s.page_indices].flatten(0, 1)[: s.context_len] for s in batch.spans]
    gathered = torch.cat(contexts)
    if kv.dtype == torch.uint8:
        gathered = unpack_records(gathered[None], latent_dim)[0]
    return gathered.to(dtype)
