"""Where a pass's tokens lie in the paged KV memory. Built once a pass, read by all layers' ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DecodeGroup", "PagedBatch", "PagedSpan"]

#: Pages that a group of decode steps may gather, as a multiple of those that its requests have.
_MAX_PADDING = 1.5


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
class DecodeGroup:
    """Requests with one token each, of similar length: one attention of B rows over C tokens."""

    #: int64 [B]: the requests' rows in the pass's [T, ...] tensors.
    rows: Tensor
    #: int64 [B * C / S]: each request's pages, its last one again and again up to C tokens.
    page_indices: Tensor
    #: bool [B, C]: which of the tokens are the request's context.
    seen: Tensor
    #: int64 each: the places (request, token) that are not.
    unseen: tuple[Tensor, Tensor]

    @classmethod
    def build(cls, page_size: int, spans: Sequence[PagedSpan]) -> DecodeGroup:
        """``spans`` have one token each."""
        num_pages = max(len(span.page_indices) for span in spans)
        tables = [
            torch.cat([pages, pages[-1:].expand(num_pages - len(pages))])
            for pages in (span.page_indices for span in spans)
        ]
        context_lens = torch.tensor([span.context_len for span in spans])
        seen = torch.arange(num_pages * page_size) < context_lens[:, None]
        unseen_requests, unseen_tokens = (~seen).nonzero(as_tuple=True)
        return cls(
            rows=torch.tensor([span.start for span in spans]),
            page_indices=torch.cat(tables),
            seen=seen,
            unseen=(unseen_requests, unseen_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """All spans of a pass, and for each of the T tokens the place of its own K and V."""

    spans: tuple[PagedSpan, ...]
    #: int64 [T]: page of the token, and its place in the page.
    token_pages: Tensor
    token_offsets: Tensor
    #: The spans again: those of decode steps that are best attended together, and all others.
    decode_groups: tuple[DecodeGroup, ...]
    lone_spans: tuple[PagedSpan, ...]

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
        together = [group for group in _groups(spans) if len(group) > 1]
        grouped = {span.start for group in together for span in group}
        return cls(
            spans=tuple(spans),
            decode_groups=tuple(DecodeGroup.build(page_size, group) for group in together),
            lone_spans=tuple(span for span in spans if span.start not in grouped),
            token_pages=torch.cat(pages) if pages else empty,
            token_offsets=torch.cat(offsets) if offsets else empty,
        )


def _groups(spans: Sequence[PagedSpan]) -> list[list[PagedSpan]]:
    """Decode steps by length, so that none is padded to many times its own."""
    groups: list[list[PagedSpan]] = []
    num_pages = 0
    for span in sorted(
        (span for span in spans if span.num_tokens == 1), key=lambda s: len(s.page_indices)
    ):
        longest = len(span.page_indices)
        if not groups or (len(groups[-1]) + 1) * longest > _MAX_PADDING * (num_pages + longest):
            groups.append([])
            num_pages = 0
        groups[-1].append(span)
        num_pages += longest
    return groups
