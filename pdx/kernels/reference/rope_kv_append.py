"""Turn k and store it with v: after this a layer's KV is final."""

from __future__ import annotations

from torch import Tensor

from pdx.kernels.batch import ForwardBatch
from pdx.kernels.reference.kv_append import kv_append
from pdx.kernels.reference.rope import rope

__all__ = ["rope_kv_append"]


def rope_kv_append(
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    batch: ForwardBatch,
    *,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """k, v [T, Hkv, D], cos and sin [T, D/2] into kv [P, Hkv, 2, S, D] (one layer), in place.

    ``kv_scales`` as in ``kv_append``.
    """
    kv_append(rope(k, cos, sin), v, kv, batch, kv_scales)
