"""The latents and rotated keys of a pass's contexts, gathered from their pages."""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.paged_batch import PagedBatch

__all__ = ["mla_contexts"]


def mla_contexts(kv: Tensor, batch: PagedBatch, latent_dim: int) -> Tensor:
    """kv [P, S, R + E] (one layer) -> [C, R + E]: the spans' contexts, one after the other."""
    contexts = [kv[s.page_indices].flatten(0, 1)[: s.context_len] for s in batch.spans]
    return torch.cat(contexts)
