"""The latents and rotated keys of a group's sequences, gathered from their pages."""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.batch import RequestGroup
from pdx.kernels.reference.mla_record import unpack_records

__all__ = ["mla_contexts"]


def mla_contexts(kv: Tensor, group: RequestGroup, latent_dim: int, dtype: torch.dtype) -> Tensor:
    """The sequences, one after the other. Nothing is asked of the device.

    Args:
        kv: [P, S, R + E] (one layer), or float8 records, uint8 [P, S, record].
        group: whose sequences.
        latent_dim: R.
        dtype: of the result.

    Returns:
        [C, R + E].
    """
    num_tokens, page_size, device = group.total_seq_len, kv.shape[1], kv.device
    requests = torch.repeat_interleave(
        torch.arange(len(group), device=device), group.seq_lens, output_size=num_tokens
    )
    places = torch.arange(num_tokens, device=device) - group.seq_starts[requests]
    pages = group.page_tables[group.table_starts[requests] + places // page_size]
    gathered = kv[pages, places % page_size]
    if kv.dtype == torch.uint8:
        gathered = unpack_records(gathered[None], latent_dim)[0]
    return gathered.to(dtype)
