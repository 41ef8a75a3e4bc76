"""MLA over latents: absorbed decode in pages, prefill over expanded keys and values."""

from __future__ import annotations

import pytest
import torch

from pdx.kernels.mla_decode import mla_decode
from pdx.kernels.mla_prefill import mla_prefill
from pdx.kernels.reference.mla_attention import mla_attention
from pdx.kernels.reference.mla_attention import mla_prefill as reference_prefill
from tests.kernels.triton.cases import DEVICE, DTYPES, PagedCase, assert_near, more

STEPS = [(0, 1), (15, 1), (16, 1), (32, 1), (95, 1)]


def compare_decode(
    steps: list[tuple[int, int]],
    *,
    num_heads: int = 16,
    dims: tuple[int, int] = (64, 16),
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    num_splits: int | None = 2,
) -> None:
    torch.manual_seed(0)
    case = PagedCase(steps, page_size)
    kv = case.latents(sum(dims), dtype)
    q = torch.randn(case.num_tokens, num_heads, sum(dims)).to(dtype)
    out = mla_decode(
        q.to(DEVICE),
        kv.to(DEVICE, dtype),
        case.group,
        0.1,
        dims[0],
        num_splits=num_splits,
    )
    assert out.dtype == dtype
    assert_near(out, mla_attention(q.double(), kv.double(), case.batch.decodes, 0.1, dims[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_equals_the_reference(dtype: torch.dtype) -> None:
    compare_decode(STEPS, dtype=dtype)


@pytest.mark.parametrize("num_heads", [9, 128, *more(1, 32, 63, 64)])
def test_decode_heads(num_heads: int) -> None:
    compare_decode([(0, 1), (40, 1)], num_heads=num_heads)


@pytest.mark.parametrize("page_size", [1, 64, *more(5, 128)])
def test_decode_page_sizes(page_size: int) -> None:
    compare_decode([(63, 1), (64, 1), (150, 1)], page_size=page_size)


@pytest.mark.parametrize("num_splits", [1, 5, None])
def test_decode_splits(num_splits: int | None) -> None:
    compare_decode([(0, 1), (300, 1)], num_splits=num_splits)


def test_decode_of_strided_queries() -> None:
    """Queries as a view of something wider, whose rows no 16 divides."""
    torch.manual_seed(0)
    case = PagedCase(STEPS, 16)
    kv = case.latents(80, torch.bfloat16)
    wide = torch.randn(case.num_tokens, 5, 83).bfloat16()
    q = wide[:, 1:4, :80]
    out = mla_decode(wide.to(DEVICE)[:, 1:4, :80], kv.to(DEVICE, q.dtype), case.group, 0.1, 64)
    assert_near(out, mla_attention(q.double(), kv.double(), case.batch.decodes, 0.1, 64))


def test_decode_of_a_models_size() -> None:
    compare_decode([(70, 1)], dims=(512, 64), page_size=64)


def test_decode_of_several_rows_is_causal_among_them() -> None:
    compare_decode([(0, 2), (31, 4), (64, 1)], num_heads=12, num_splits=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunks", [[(0, 1), (0, 70), (63, 3)], [(100, 140)]], ids=str)
@pytest.mark.parametrize("dims", [(32, 16, 32), *more((128, 64, 128))], ids=str)
def test_prefill_equals_the_reference(
    chunks: list[tuple[int, int]], dims: tuple[int, int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    nope, rope, value = dims
    case = PagedCase(chunks, 16)
    contexts = [sum(chunk) for chunk in chunks]
    # Keys and values as the views of one projection that they are.
    expanded = torch.randn(sum(contexts), 2, nope + value).to(dtype)
    k_rope = torch.randn(sum(contexts), rope).to(dtype)
    q = torch.randn(case.num_tokens, 2, nope + rope).to(dtype)
    out = mla_prefill(
        q.to(DEVICE),
        expanded.to(DEVICE)[..., :nope],
        k_rope.to(DEVICE),
        expanded.to(DEVICE)[..., nope:],
        case.group,
        0.1,
    )
    wide = expanded.double()
    expected = reference_prefill(
        q.double(), wide[..., :nope], k_rope.double(), wide[..., nope:], case.batch.decodes, 0.1
    )
    assert_near(out, expected)
