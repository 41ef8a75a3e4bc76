"""The Triton kernels with the face of :class:`Ops`. Imported only by ranks that run them.

Today that is a rank with ``PDX_KERNELS=interpret``: tiny models end to end through the kernels, on
a CPU, to show that they are right where they are used. Its main thread.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pdx.errors import ConfigError
from pdx.kernels.page_tables import PageTables
from pdx.kernels.paged_batch import PagedBatch
from pdx.kernels.paged_decode import paged_decode
from pdx.kernels.paged_prefill import paged_prefill
from pdx.kernels.rope_kv_append import rope
from pdx.kernels.rope_kv_append import rope_kv_append as append

__all__ = ["PagedAttention", "prepare_interpreter", "rope", "rope_kv_append"]


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
    if k.dtype != torch.float32:
        raise ConfigError(
            f"Triton's interpreter computes {str(k.dtype).removeprefix('torch.')} wrongly",
            hint="use --dtype float32 with PDX_KERNELS=interpret",
        )
    append(k[:, :0], k, v, cos, sin, kv, batch.token_pages, batch.token_offsets)


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
