"""Copies between paged memories: other heads, other page sizes, nothing else touched."""

from __future__ import annotations

import pytest
import torch

from pdx.kernels.page_copy import page_copy
from pdx.kernels.reference.page_copy import page_copy as reference
from tests.kernels.triton.cases import DEVICE

NAN = float("nan")


@pytest.mark.parametrize(
    ("page_sizes", "heads", "num_tokens"),
    [
        ((16, 16), {}, 37),
        ((16, 16), {}, 0),
        ((16, 64), {}, 64),
        ((64, 16), {}, 65),
        ((1, 128), {}, 40),
        ((16, 16), {"source_head": 2, "num_heads": 1}, 33),
        ((16, 32), {"source_head": 1, "target_head": 3, "num_heads": 2}, 33),
    ],
)
def test_context_goes_to_its_new_place(
    page_sizes: tuple[int, int], heads: dict[str, int], num_tokens: int
) -> None:
    torch.manual_seed(0)
    source_page, target_page = page_sizes
    shape = (3, 2, source_page, 80)
    num_source, num_target = (-(-num_tokens // size) + 2 for size in page_sizes)
    source = torch.randn(num_source, *shape).bfloat16()
    target = torch.full((num_target, 5, 2, target_page, 80), NAN, dtype=torch.bfloat16)
    source_pages, target_pages = (
        torch.randperm(n)[: n - 2].to(torch.int32) for n in (num_source, num_target)
    )
    copied = target.to(DEVICE, copy=True)
    page_copy(
        source.to(DEVICE),
        source_pages.to(DEVICE),
        copied,
        target_pages.to(DEVICE),
        num_tokens,
        **heads,
    )
    reference(source, source_pages, target, target_pages, num_tokens, **heads)
    torch.testing.assert_close(copied.cpu(), target, rtol=0, atol=0, equal_nan=True)


def test_bytes_are_copied_as_they_are() -> None:
    """Any dtype, NaN among them."""
    source = torch.arange(256, dtype=torch.uint8).view(1, 1, 2, 8, 16).to(DEVICE)
    target = torch.zeros_like(source)
    page = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    page_copy(source, page, target, page, 8)
    assert torch.equal(source, target)
