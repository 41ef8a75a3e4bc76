"""The Triton kernels with the face of :class:`Ops`. Imported only by ranks that run them.

Today that is a rank with ``PDX_KERNELS=interpret``: tiny models end to end through the kernels, on
a CPU, to show that they are right where they are used. Its main thread.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pdx.errors import ConfigError
from pdx.kernels.mla_decode import mla_decode
from pdx.kernels.mla_kv_append import mla_kv_append
from pdx.kernels.mla_prefill import mla_prefill
from pdx.kernels.page_tables import PageTables
from pdx.kernels.paged_batch import PagedBatch
from pdx.kernels.paged_decode import paged_decode
from pdx.kernels.paged_prefill import paged_prefill
from pdx.kernels.rms_norm import add_rms_norm, rms_norm
from pdx.kernels.rope_kv_append import rope
from pdx.kernels.rope_kv_append import rope_kv_append as append
from pdx.kernels.silu_mul import silu_mul

__all__ = [
    "MlaAttention",
    "MlaChunkAttention",
    "PagedAttention",
    "add_rms_norm",
    "mla_append",
    "prepare_interpreter",
    "rms_norm",
    "rope",
    "rope_interleaved",
    "rope_kv_append",
    "silu_mul",
]


def prepare_interpreter() -> None:
    """Keep numpy from telling of each exp2(-inf), of which a softmax has many."""
    np.seterr(all="ignore")


def rope_kv_append(
    k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: PagedBatch
) -> None:
    """See ``kernels/reference/rope_kv_append``.

    Raises:
        ConfigError: the dtype is one that the interpreter has no arithmetic for.
    """
    _check_dtype(k)
    append(k[:, :0], k, v, cos, sin, kv, batch.token_pages, batch.token_offsets)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``kernels/reference/rope``."""
    return rope(x, cos, sin, interleaved=True)


def mla_append(
    latent: Tensor,
    k_rope: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    batch: PagedBatch,
    interleaved: bool,
) -> None:
    """See ``kernels/reference/mla_append``.

    Raises:
        ConfigError: the dtype is one that the interpreter has no arithmetic for.
    """
    _check_dtype(k_rope)
    places = batch.token_pages, batch.token_offsets
    mla_kv_append(latent, k_rope, cos, sin, kv, *places, interleaved=interleaved)


def _check_dtype(x: Tensor) -> None:
    if x.dtype != torch.float32:
        raise ConfigError(
            f"Triton's interpreter computes {str(x.dtype).removeprefix('torch.')} wrongly",
            hint="use --dtype float32 with PDX_KERNELS=interpret",
        )


class PagedAttention:
    """Decode steps through one kernel, chunks through the other.

    Keeps the tables of the pass that runs, which all layers read.
    """

    def __init__(self) -> None:
        self._batch: PagedBatch | None = None
        self._tables: tuple[PageTables, PageTables] | None = None

    def __call__(self, q: Tensor, kv: Tensor, batch: PagedBatch, scale: float) -> Tensor:
        """See ``kernels/reference/paged_attention``."""
        if batch is not self._batch or self._tables is None:
            steps = [span for span in batch.spans if span.num_tokens == 1]
            self._tables = (PageTables.of(steps, q.device), PageTables.of(batch.chunks, q.device))
            self._batch = batch
        steps_tables, chunk_tables = self._tables
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        paged_decode(q, kv, steps_tables, scale, out=out)
        return paged_prefill(q, kv, chunk_tables, scale, out=out)


class MlaAttention:
    """Steps over their latents. Keeps the tables of the pass that runs."""

    def __init__(self) -> None:
        self._batch: PagedBatch | None = None
        self._tables: PageTables | None = None

    def __call__(
        self, q: Tensor, kv: Tensor, batch: PagedBatch, scale: float, latent_dim: int
    ) -> Tensor:
        """See ``kernels/reference/mla_attention``."""
        if batch is not self._batch or self._tables is None:
            self._tables, self._batch = PageTables.of(batch.spans, q.device), batch
        return mla_decode(q, kv, self._tables, scale, latent_dim)


class MlaChunkAttention:
    """Chunks over the keys and values made from their contexts. Keeps the tables of the pass."""

    def __init__(self) -> None:
        self._batch: PagedBatch | None = None
        self._tables: tuple[PageTables, Tensor] | None = None

    def __call__(
        self,
        q: Tensor,
        k_nope: Tensor,
        k_rope: Tensor,
        v: Tensor,
        batch: PagedBatch,
        scale: float,
    ) -> Tensor:
        """See ``kernels/reference/mla_attention``."""
        if batch is not self._batch or self._tables is None:
            tables = PageTables.of(batch.spans, q.device)
            starts = tables.context_lens.cumsum(0, dtype=torch.int32) - tables.context_lens
            self._tables, self._batch = (tables, starts), batch
        tables, starts = self._tables
        return mla_prefill(q, k_nope, k_rope, v, tables, starts, scale)
