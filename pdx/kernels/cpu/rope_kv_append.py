"""Turn k and store it with v on a CPU.

Specification: ``kernels/reference/rope_kv_append``.
"""

from __future__ import annotations

from torch import Tensor

from pdx.kernels.cpu.kv_append import kv_append
from pdx.kernels.cpu.rope import rope
from pdx.kernels.paged_batch import PagedBatch

__all__ = ["rope_kv_append"]


def rope_kv_append(
    k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: PagedBatch
) -> None:
    """k, v [T, Hkv, D], cos and sin [T, D/2] into kv [P, Hkv, 2, S, D] (one layer), in place."""
    kv_append(rope(k, cos, sin), v, kv, batch)
