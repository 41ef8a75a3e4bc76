"""Where a pass's tokens lie in the paged KV memory. Built once a pass, read by all layers' ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PagedBatch", "PagedSpan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSpan:
    """One request's rows of a pass: ``start .. start + num_tokens`` of the [T, ...] tensors."""

    start: int
    num_tokens: int
    #: Tokens of the request in KV memory once this pass has appended its own; the rows are its last
    #: ones.
    context_len: int
    #: The pages that hold the context, in order; int64 [ceil(context_len / S)].
    page_indices: Tensor

    @property
    def rows(self) -> slice:
        """The span in the pass's [T, ...] tensors."""
        return slice(self.start, self.start + self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """All spans of a pass, and for each of the T tokens the place of its own K and V."""

    spans: tuple[PagedSpan, ...]
    #: int64 [T]: page of the token, and its place in the page.
    token_pages: Tensor
    token_offsets: Tensor

    @classmethod
    def build(
        cls, page_size: int, requests: Sequence[tuple[int, int, Sequence[int]]]
    ) -> PagedBatch:
        """From (tokens computed before, tokens of this pass, page table) of each request in order.

        Page tables may be longer than the context; the rest is left alone.
        """
        spans: list[PagedSpan] = []
        pages: list[Tensor] = []
        offsets: list[Tensor] = []
        start = 0
        for num_computed, num_tokens, page_table in requests:
            context_len = num_computed + num_tokens
            num_pages = -(-context_len // page_size)
            assert len(page_table) >= num_pages, "a page table is shorter than its context"
            table = torch.tensor(page_table[:num_pages], dtype=torch.int64)
            positions = torch.arange(num_computed, context_len)
            pages.append(table[positions // page_size])
            offsets.append(positions % page_size)
            spans.append(
                PagedSpan(
                    start=start, num_tokens=num_tokens, context_len=context_len, page_indices=table
                )
            )
            start += num_tokens
        empty = torch.empty(0, dtype=torch.int64)
        return cls(
            spans=tuple(spans),
            token_pages=torch.cat(pages) if pages else empty,
            token_offsets=torch.cat(offsets) if offsets else empty,
        )
