"""Attention of chunks: cached and new tokens, tiles of rows, pages, windows, caps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pdx.kernels.kv_view import FLOAT8
from pdx.kernels.paged_prefill import paged_prefill
from pdx.kernels.reference.paged_attention import paged_attention
from tests.kernels.triton.cases import DEVICE, DTYPES, PagedCase, assert_near, more

#: Chunks about the edges of pages (16), of tiles of the context (64) and of rows (128 / 3).
CHUNKS = [(0, 1), (0, 43), (62, 3), (100, 42)]


def compare(
    chunks: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_kv_heads: int = 1,
    num_groups: int = 3,
    head_dim: int = 64,
    page_size: int = 16,
    size: float = 1.0,
    **options: Any,
) -> None:
    torch.manual_seed(0)
    case = PagedCase(chunks, page_size)
    kv = case.heads(num_kv_heads, head_dim, dtype)
    q = (torch.randn(case.num_tokens, num_kv_heads * num_groups, head_dim) * size).to(dtype)
    scale = head_dim**-0.5
    seen = case.without_the_past(kv, options["window"]) if "window" in options else kv
    out = paged_prefill(q.to(DEVICE), seen.to(DEVICE, dtype), case.group, scale, **options)
    assert out.dtype == dtype
    assert_near(out, paged_attention(q.double(), kv.double(), case.batch, scale, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference(dtype: torch.dtype) -> None:
    compare(CHUNKS, dtype=dtype, num_kv_heads=2)


@pytest.mark.parametrize("head_dim", [80, 96, 256, *more(16, 128)])
def test_head_dims(head_dim: int) -> None:
    compare([(70, 9)], head_dim=head_dim)


@pytest.mark.parametrize("num_groups", [1, 5, 12, *more(2, 8)])
def test_groups_share_a_kv_head(num_groups: int) -> None:
    compare([(40, 30), (0, 2)], num_groups=num_groups)


@pytest.mark.parametrize("page_size", [1, 64, 128, *more(5)])
def test_page_sizes(page_size: int) -> None:
    compare([(0, 64), (65, 64)], page_size=page_size)


@pytest.mark.parametrize("window", [40, 65, *more(1, 64, 500)])
def test_window_skips_what_no_row_sees(window: int) -> None:
    compare([(0, 3), (100, 90), (63, 65)], window=window, num_groups=2)


def test_soft_cap() -> None:
    compare(CHUNKS, soft_cap=2.0)


def test_soft_cap_of_scores_whose_exponential_overflows() -> None:
    compare(CHUNKS, soft_cap=30.0, size=1000.0, dtype=torch.float32)


def test_whole_prompt_of_several_tiles() -> None:
    compare([(0, 300)], num_groups=1)


def test_strided_queries_fill_a_given_result() -> None:
    """Queries as a view of a fused projection; the rows of other requests stay."""
    torch.manual_seed(0)
    case = PagedCase(CHUNKS, 16)
    kv = case.heads(2, 64, torch.float32)
    fused = torch.randn(case.num_tokens, 10, 64)
    q, out = fused[:, 2:6], torch.full((case.num_tokens, 4, 64), 7.0, device=DEVICE)
    columns = ("query_starts", "query_lens", "seq_lens", "seq_starts", "table_starts")
    group = replace(case.group, **{name: getattr(case.group, name)[2:] for name in columns})
    paged_prefill(fused.to(DEVICE)[:, 2:6], kv.to(DEVICE), group, 0.125, out=out)
    expected = paged_attention(q.double(), kv.double(), case.batch, 0.125)
    assert_near(out[44:], expected[44:])
    assert bool((out[:44] == 7.0).all())


def test_float8_kv_with_static_scales() -> None:
    torch.manual_seed(0)
    case = PagedCase(CHUNKS, 16)
    stored = case.heads(1, 64, FLOAT8)
    q = torch.randn(case.num_tokens, 3, 64).bfloat16()
    out = paged_prefill(
        q.to(DEVICE), stored.to(DEVICE, FLOAT8), case.group, 0.125, kv_scales=(0.5, 3.0)
    )
    meant = stored.double() * torch.tensor([0.5, 3.0]).view(1, 1, 2, 1, 1)
    assert_near(out, paged_attention(q.double(), meant, case.batch, 0.125))
