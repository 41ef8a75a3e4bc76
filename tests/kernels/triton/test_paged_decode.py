"""Decode attention over paged K and V: lengths, pages, groups, splits, windows, caps, drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdx.kernels.kv_view import FLOAT8
from pdx.kernels.paged_decode import paged_decode
from pdx.kernels.reference.paged_attention import paged_attention
from tests.kernels.triton.cases import (
    DEVICE,
    DTYPES,
    PagedCase,
    assert_near,
    more,
    on_device,
    one_group,
)

#: Lengths about the edges of pages (16) and of tiles (64).
STEPS = [(0, 1), (15, 1), (16, 1), (64, 1), (127, 1)]


def compare(
    steps: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    num_kv_heads: int = 2,
    num_groups: int = 3,
    head_dim: int = 64,
    page_size: int = 16,
    num_splits: int | None = 2,
    size: float = 1.0,
    **options: Any,
) -> None:
    torch.manual_seed(0)
    case = PagedCase(steps, page_size)
    kv = case.heads(num_kv_heads, head_dim, dtype)
    q = (torch.randn(case.num_tokens, num_kv_heads * num_groups, head_dim) * size).to(dtype)
    scale = head_dim**-0.5
    seen = case.without_the_past(kv, options["window"]) if "window" in options else kv
    out = paged_decode(
        q.to(DEVICE),
        seen.to(DEVICE, dtype),
        case.group,
        scale,
        num_splits=num_splits,
        **options,
    )
    assert out.dtype == dtype
    assert_near(out, paged_attention(q.double(), kv.double(), case.batch, scale, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference(dtype: torch.dtype) -> None:
    compare(STEPS, dtype=dtype)


@pytest.mark.parametrize("head_dim", [80, 96, 256, *more(16, 128)])
def test_head_dims(head_dim: int) -> None:
    compare([(0, 1), (70, 1)], head_dim=head_dim, num_kv_heads=1, dtype=torch.bfloat16)


@pytest.mark.parametrize("num_groups", [1, 5, 12, *more(2, 4, 8)])
def test_groups_share_a_kv_head(num_groups: int) -> None:
    compare([(0, 1), (70, 1)], num_groups=num_groups)


@pytest.mark.parametrize("page_size", [1, 64, 128, *more(5)])
def test_page_sizes(page_size: int) -> None:
    compare([(0, 1), (63, 1), (64, 1), (150, 1)], page_size=page_size, num_kv_heads=1)


@pytest.mark.parametrize("num_splits", [1, 8, *more(3)])
def test_splits(num_splits: int) -> None:
    compare([(0, 1), (64, 1), (300, 1)], num_splits=num_splits, num_kv_heads=1)


def test_splits_are_chosen_from_the_launch() -> None:
    compare([(1000, 1), (3, 1)], num_splits=None, num_kv_heads=1)


@pytest.mark.parametrize("num_splits", [3, *more(1)])
@pytest.mark.parametrize("window", [1, 40, 65, *more(64, 500)])
def test_window_skips_what_no_row_sees(window: int, num_splits: int) -> None:
    compare([(0, 1), (63, 1), (199, 1)], window=window, num_splits=num_splits, num_kv_heads=1)


def test_soft_cap() -> None:
    compare(STEPS, soft_cap=2.0, num_kv_heads=1)


def test_soft_cap_of_scores_whose_exponential_overflows() -> None:
    compare(STEPS, soft_cap=30.0, num_kv_heads=1, size=1000.0)


def test_scores_far_below_zero_are_valid() -> None:
    """A finite stand-in for -inf would be larger than these, and give zeros."""
    torch.manual_seed(0)
    case = PagedCase([(20, 1)], 16)
    kv = case.heads(1, 16, torch.float32)
    kv[:, :, 0] = kv[:, :, 0].abs()
    q = -torch.rand(1, 1, 16) * 1e6
    out = paged_decode(q.to(DEVICE), kv.to(DEVICE), case.group, 1.0, num_splits=2)
    # float32 scores of 1e7 are whole numbers: where two are near, their weights are not.
    assert_near(out, paged_attention(q, kv, case.batch, 1.0), 1e-3)


@pytest.mark.parametrize("num_rows", [4, *more(2)])
def test_several_rows_are_causal_among_themselves(num_rows: int) -> None:
    compare([(0, num_rows), (62, num_rows), (100, 1), (7, num_rows - 1)], num_splits=3)


def test_several_rows_in_a_window() -> None:
    compare([(0, 4), (62, 3), (130, 4)], window=10, num_splits=2)


def test_rows_that_a_whole_split_comes_after() -> None:
    """The second split holds only the last token, which the first rows do not see."""
    compare([(61, 4)], num_splits=2)


def test_strided_queries() -> None:
    """Queries as a view of a fused projection."""
    torch.manual_seed(0)
    case = PagedCase(STEPS, 16)
    kv = case.heads(2, 64, torch.float32)
    fused = torch.randn(len(STEPS), 10, 64)
    q = fused[:, 2:6]
    out = paged_decode(fused.to(DEVICE)[:, 2:6], kv.to(DEVICE), case.group, 0.125)
    assert_near(out, paged_attention(q.double(), kv.double(), case.batch, 0.125))


def test_no_requests() -> None:
    group = on_device(one_group(16, []))
    q, kv = torch.empty(0, 4, 64, device=DEVICE), torch.empty(1, 2, 2, 16, 64, device=DEVICE)
    assert paged_decode(q, kv, group, 1.0).shape == (0, 4, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *more(torch.float16)], ids=str)
def test_float8_kv_with_static_scales(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = PagedCase(STEPS, 16)
    stored = case.heads(2, 64, FLOAT8)
    q = torch.randn(case.num_tokens, 6, 64).to(dtype)
    k_scale, v_scale = 0.5, 3.0
    out = paged_decode(
        q.to(DEVICE),
        stored.to(DEVICE, FLOAT8),
        case.group,
        0.125,
        kv_scales=(k_scale, v_scale),
        num_splits=2,
    )
    meant = stored.double() * torch.tensor([k_scale, v_scale]).view(1, 1, 2, 1, 1)
    assert_near(out, paged_attention(q.double(), meant, case.batch, 0.125))
