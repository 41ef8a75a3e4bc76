"""Latents and rotated keys as float8 records (``kernels/mla_record``), and back.

A quarter of a latent is stored as x / scale with scale = max |x| / 448, or 1 where all are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.mla_record import FLOAT8_MAX, NUM_SCALES, LatentParts, record_bytes

__all__ = ["pack_records", "unpack_records"]


def pack_records(latent: Tensor, rope: Tensor) -> Tensor:
    """latent [T, R], rope [T, E] -> uint8 [T, record]."""
    num_tokens, latent_dim = latent.shape
    size = record_bytes(latent_dim, rope.shape[1])
    records = torch.zeros(1, num_tokens, size, dtype=torch.uint8, device=latent.device)
    parts = LatentParts.of(records, latent_dim)
    quarters = latent.float().view(num_tokens, NUM_SCALES, -1)
    largest = quarters.abs().amax(dim=-1)
    scales = torch.where(largest == 0, 1.0, largest / FLOAT8_MAX)
    parts.latent[0] = (quarters / scales[..., None]).flatten(1).to(parts.latent.dtype)
    parts.scale[0] = scales
    parts.rope[0] = rope.to(torch.bfloat16)
    return records[0]


def unpack_records(records: Tensor, latent_dim: int) -> Tensor:
    """uint8 [P, S, record] -> float32 [P, S, R + E]."""
    parts = LatentParts.of(records, latent_dim)
    quarters = parts.latent.float().reshape(*records.shape[:2], NUM_SCALES, -1)
    latent = (quarters * parts.scale[..., None]).flatten(-2)
    return torch.cat([latent, parts.rope.float()], dim=-1)
