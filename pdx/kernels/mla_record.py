"""The float8 form of a token's latent memory, and the parts of it that kernels address.

A record is R float8_e4m3fn values, 4 float32 scales (one for each quarter of the latent), then E
bfloat16 values of the rotated key: 656 bytes for 512 + 64. No scale lives outside its page. The
layout is FlashMLA's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdx.kernels.kv_view import FLOAT8

__all__ = ["FLOAT8_MAX", "NUM_SCALES", "LatentParts", "record_bytes"]

NUM_SCALES = 4
FLOAT8_MAX = 448.0


def record_bytes(latent_dim: int, rope_dim: int) -> int:
    """Size of the record of one token in one layer."""
    return latent_dim + 4 * NUM_SCALES + 2 * rope_dim


@dataclass(frozen=True, slots=True)
class LatentParts:
    """Views of a memory: latents [P, S, R], scales [P, S, 4], rotated keys [P, S, E]."""

    latent: Tensor
    scale: Tensor
    rope: Tensor

    @classmethod
    def of(cls, kv: Tensor, latent_dim: int) -> LatentParts:
        """kv [P, S, R + E], or uint8 [P, S, record]; without records, ``scale`` is the latents."""
        assert kv.stride()[1:] == (kv.shape[2], 1)
        if kv.dtype != torch.uint8:
            return cls(kv[..., :latent_dim], kv[..., :latent_dim], kv[..., latent_dim:])
        scales_end = latent_dim + 4 * NUM_SCALES
        return cls(
            kv.view(FLOAT8)[..., :latent_dim],
            kv.view(torch.float32)[..., latent_dim // 4 : scales_end // 4],
            kv.view(torch.bfloat16)[..., scales_end // 2 :],
        )
