"""Where a pass's tokens lie in the paged KV memory. Built once a pass, read by all layers' ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["STEP_ROWS", "BatchPart", "DecodeSteps", "PagedBatch", "PagedSpan"]

#: Rows of a step at most: a token, and a draft.
STEP_ROWS = 2


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
    def is_step(self) -> bool:
        """A token, or a token and the draft behind it: little work, over all of a context."""
        return self.num_tokens <= STEP_ROWS

    @property
    def rows(self) -> slice:
        """The span in the pass's [T, ...] tensors."""
        return slice(self.start, self.start + self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSteps:
    """The spans of one token, as arrays: B requests. All int64, contiguous."""

    #: [B]: rows in the pass's [T, ...] tensors.
    rows: Tensor
    #: [B].
    context_lens: Tensor
    #: [B]: where each request's pages begin in ``page_indices``.
    table_starts: Tensor
    page_indices: Tensor

    @classmethod
    def of(cls, spans: Sequence[PagedSpan]) -> DecodeSteps:
        """From spans of one token each."""
        starts, num_pages = [], 0
        for span in spans:
            starts.append(num_pages)
            num_pages += len(span.page_indices)
        return cls(
            rows=_int64([span.start for span in spans]),
            context_lens=_int64([span.context_len for span in spans]),
            table_starts=_int64(starts),
            page_indices=torch.cat([_int64([]), *(span.page_indices for span in spans)]),
        )

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPart:
    """Some spans of a pass as a batch of their own."""

    #: int64 [T of the part]: its rows in the pass's [T, ...] tensors.
    rows: Tensor
    batch: PagedBatch


@dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """All spans of a pass, and for each of the T tokens the place of its own K and V."""

    spans: tuple[PagedSpan, ...]
    #: Those of ``spans`` that have one token; the others.
    decode_steps: DecodeSteps
    chunks: tuple[PagedSpan, ...]
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
        pages: list[int] = []
        offsets: list[int] = []
        for num_computed, num_tokens, page_table in requests:
            context_len = num_computed + num_tokens
            num_pages = -(-context_len // page_size)
            assert len(page_table) >= num_pages, "a page table is shorter than its context"
            spans.append(
                PagedSpan(
                    start=len(pages),
                    num_tokens=num_tokens,
                    context_len=context_len,
                    page_indices=_int64(page_table[:num_pages]),
                )
            )
            for position in range(num_computed, context_len):
                pages.append(page_table[position // page_size])
                offsets.append(position % page_size)
        return cls(
            spans=tuple(spans),
            decode_steps=DecodeSteps.of([span for span in spans if span.num_tokens == 1]),
            chunks=tuple(span for span in spans if span.num_tokens > 1),
            token_pages=_int64(pages),
            token_offsets=_int64(offsets),
        )

    # Layers whose attention computes steps and chunks in different ways ask for these; no slots,
    # so that they are made once a pass.
    @cached_property
    def decode_part(self) -> BatchPart:
        """The steps, with a draft or without: spans of :data:`STEP_ROWS` tokens at most."""
        return self._part(tuple(span for span in self.spans if span.is_step))

    @cached_property
    def chunk_part(self) -> BatchPart:
        """The others."""
        return self._part(tuple(span for span in self.spans if not span.is_step))

    def _part(self, spans: tuple[PagedSpan, ...]) -> BatchPart:
        rows: list[int] = []
        moved: list[PagedSpan] = []
        for span in spans:
            moved.append(replace(span, start=len(rows)))
            rows += range(span.start, span.start + span.num_tokens)
        indices = _int64(rows)
        batch = PagedBatch(
            spans=tuple(moved),
            decode_steps=DecodeSteps.of([span for span in moved if span.num_tokens == 1]),
            chunks=tuple(span for span in moved if span.num_tokens > 1),
            token_pages=self.token_pages[indices],
            token_offsets=self.token_offsets[indices],
        )
        return BatchPart(rows=indices, batch=batch)


def _int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
