"""One attention over paged KV memory, as data: what every library lays out in its own way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from pdx.kernels.batch import ForwardBatch, RequestGroup
from pdx.kernels.staging import Staging

__all__ = ["PAGE_SIZE", "PagedProblem", "group_on", "shuffled_tables"]

PAGE_SIZE = 64


def shuffled_tables(requests: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Page tables of requests (tokens cached, new tokens): together all pages, in random order."""
    counts = [-(-sum(request) // PAGE_SIZE) for request in requests]
    pages = iter(torch.randperm(sum(counts)).tolist())
    return [list(islice(pages, count)) for count in counts]


def group_on(
    device: torch.device, requests: Sequence[tuple[int, int, Sequence[int]]]
) -> RequestGroup:
    """Requests (tokens cached, new tokens, page table) as one group."""
    batch = ForwardBatch.build(PAGE_SIZE, requests, decode_rows=0)
    return batch.on(Staging(device))[0].chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedProblem:
    """B requests whose T new rows are appended, in full or last pages that their tables name."""

    #: [T, Hq, D] or, over latents, [T, Hq, R + E].
    q: Tensor
    #: [P, Hkv, 2, S, D] or, over latents, [P, S, R + E].
    kv: Tensor
    #: Tokens cached, and new ones, of each.
    requests: tuple[tuple[int, int], ...]
    tables: list[list[int]]
    scale: float

    @property
    def contexts(self) -> list[int]:
        """Tokens of each."""
        return [sum(request) for request in self.requests]

    def group(self) -> RequestGroup:
        """The requests as this project's kernels read them."""
        requests = zip(self.requests, self.tables, strict=True)
        return group_on(self.q.device, [(*request, table) for request, table in requests])

    def unpaged(self) -> Tensor:
        """The memory of requests of one length, in the order of their tokens: pages become
        [B, C, ...]. Of heads: [B, Hkv, 2, C, D].
        """
        pages = self.kv[torch.tensor(self.tables, device=self.kv.device)]
        context = self.contexts[0]
        if self.kv.dim() == 3:
            return pages.flatten(1, 2)[:, :context].contiguous()
        merged = pages.permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
        return merged[:, :, :, :context].contiguous()
