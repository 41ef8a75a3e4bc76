"""Requests in poisoned, permuted pages, for all attention kernels; where kernels run; closeness."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pdx.kernels.batch import ForwardBatch, RequestGroup
from pdx.kernels.staging import Staging

__all__ = [
    "DEVICE",
    "DTYPES",
    "TOLERANCE",
    "PagedCase",
    "assert_near",
    "more",
    "on_device",
    "one_group",
]

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
#: Of the norm of a result, against float64: sums in float32, then one rounding of the result; the
#: products' operands (and the softmax weights) are rounded to the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 5e-3}
DTYPES = list(TOLERANCE)
NAN = float("nan")


def more(*values: Any) -> list[Any]:
    """Values of a parameter that only the slow run tries (and a GPU)."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def assert_near(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Finite everywhere, and near in norm."""
    assert actual.shape == expected.shape
    wide = actual.detach().cpu().double()
    assert bool(wide.isfinite().all()), "a value is not finite"
    difference = (wide - expected.double()).norm() / expected.double().norm()
    assert float(difference) < (tolerance or TOLERANCE[actual.dtype])


def one_group(page_size: int, requests: Sequence[tuple[int, int, Sequence[int]]]) -> ForwardBatch:
    """A batch whose requests all decode, however many rows they have."""
    return ForwardBatch.build(page_size, requests, decode_rows=1 << 20)


def on_device(batch: ForwardBatch) -> RequestGroup:
    """The requests of :func:`one_group` where kernels read them."""
    return batch.on(Staging(DEVICE))[0].decodes


class PagedCase:
    """Requests (tokens cached, tokens of this pass), all appended, in shuffled pages.

    Memory that holds no token of a context is NaN: unused pages, and the tail of each last page.
    ``row_shape`` is what one token of one page has: (Hkv, 2, S, D) for heads, (S, W) for latents.
    """

    def __init__(self, requests: Sequence[tuple[int, int]], page_size: int) -> None:
        self.requests = list(requests)
        self.page_size = page_size
        num_pages = [-(-sum(request) // page_size) for request in requests]
        self.num_pages = sum(num_pages) + 2
        shuffled = torch.randperm(self.num_pages).tolist()
        self.tables = [[shuffled.pop() for _ in range(n)] for n in num_pages]
        #: All of them in one group, on the host and on the device.
        self.batch = one_group(
            page_size, [(*r, table) for r, table in zip(requests, self.tables, strict=True)]
        )
        self.group = on_device(self.batch)
        self.num_tokens = sum(new for _, new in requests)

    def heads(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
        """[P, Hkv, 2, S, D] in float32 that holds values of ``dtype``."""
        kv = torch.randn(self.num_pages, num_kv_heads, 2, self.page_size, head_dim)
        return self._poisoned(kv.permute(0, 3, 1, 2, 4), dtype).permute(0, 2, 3, 1, 4).contiguous()

    def latents(self, width: int, dtype: torch.dtype) -> Tensor:
        """[P, S, width], likewise."""
        return self._poisoned(torch.randn(self.num_pages, self.page_size, width), dtype)

    def without_the_past(self, kv: Tensor, window: int) -> Tensor:
        """A copy of ``heads`` in which whatever lies before every row's window is NaN."""
        kv = kv.clone()
        for (cached, _), table in zip(self.requests, self.tables, strict=True):
            for token in range(max(0, cached + 1 - window)):
                kv[table[token // self.page_size], :, :, token % self.page_size] = NAN
        return kv

    def _poisoned(self, memory: Tensor, dtype: torch.dtype) -> Tensor:
        used = torch.zeros(self.num_pages, self.page_size, dtype=torch.bool)
        for request, table in zip(self.requests, self.tables, strict=True):
            for token in range(sum(request)):
                used[table[token // self.page_size], token % self.page_size] = True
        memory = memory.to(dtype).float()
        memory[~used] = NAN
        return memory
