"""Rows and pages of a batch's requests as kernels read them: int32, on their device. Ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdx.kernels.paged_batch import PagedSpan

__all__ = ["PageTables"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTables:
    """B requests. The arrays may be longer lived than a pass: a captured graph reads them anew.

    A place whose ``num_rows`` is 0 is unused (a graph's batch is padded): nothing of it is read or
    written.
    """

    #: [B]: the request's first row in the pass's [T, ...] tensors, and how many it has. They are
    #: the last tokens of its context.
    row_starts: Tensor
    num_rows: Tensor
    #: [B]: tokens in KV memory, those of the rows included.
    context_lens: Tensor
    #: [B]: where the request's pages begin in ``page_indices``.
    table_starts: Tensor
    page_indices: Tensor
    #: Bounds on what ``num_rows`` and ``context_lens`` hold; launches are sized by them.
    max_rows: int
    max_context_len: int

    @classmethod
    def of(cls, spans: Sequence[PagedSpan], device: torch.device) -> PageTables:
        """The tables of some spans of a pass."""

        def array(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        starts, num_pages = [], 0
        for span in spans:
            starts.append(num_pages)
            num_pages += len(span.page_indices)
        # One entry at least: a kernel may be given no pointer to nothing.
        pages = [page for span in spans for page in span.page_indices.tolist()] or [0]
        return cls(
            row_starts=array([span.start for span in spans]),
            num_rows=array([span.num_tokens for span in spans]),
            context_lens=array([span.context_len for span in spans]),
            table_starts=array(starts),
            page_indices=array(pages),
            max_rows=max((span.num_tokens for span in spans), default=0),
            max_context_len=max((span.context_len for span in spans), default=0),
        )

    def __len__(self) -> int:
        return len(self.row_starts)
