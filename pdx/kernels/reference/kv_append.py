"""Store the K and V of a pass's tokens: kv[page(t), :, 0, offset(t)] = k[t], and v[t] at 1."""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.batch import ForwardBatch

__all__ = ["kv_append"]

_FLOAT8 = torch.float8_e4m3fn


def kv_append(
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    batch: ForwardBatch,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """k, v [T, Hkv, D] into kv [P, Hkv, 2, S, D] (one layer), in place; all else in kv stays.

    Args:
        kv_scales: what a stored K, and a stored V, of 1 means, where kv is float8_e4m3fn; what is
            too large for it is stored as its largest number.
    """
    for part, (values, scale) in enumerate(zip((k, v), kv_scales, strict=True)):
        kv[batch.token_pages, :, part, batch.token_offsets] = _stored(values, scale, kv.dtype)


def _stored(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    if dtype != _FLOAT8:
        return values
    limit = torch.finfo(_FLOAT8).max
    return (values.to(torch.float32) / scale).clamp(-limit, limit).to(_FLOAT8)
