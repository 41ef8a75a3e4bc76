"""Turn the part of the keys that all heads share and store it behind the latent: after this a
layer's KV is final.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.batch import ForwardBatch
from pdx.kernels.reference.mla_record import pack_records
from pdx.kernels.reference.rope import rope, rope_interleaved

__all__ = ["mla_append"]


def mla_append(
    latent: Tensor,
    k_rope: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    batch: ForwardBatch,
    interleaved: bool,
) -> None:
    """latent [T, R], k_rope [T, E], cos and sin [T, E/2] into kv [P, S, R + E] (one layer), or
    float8 records, uint8 [P, S, record].
    """
    turn = rope_interleaved if interleaved else rope
    turned = turn(k_rope[:, None], cos, sin)[:, 0]
    if kv.dtype == torch.uint8:
        records = pack_records(latent, turned)
    else:
        records = torch.cat([latent, turned], dim=-1)
    kv[batch.token_pages, batch.token_offsets] = records.to(kv.dtype)
