"""Offsets past 2^31 elements: pages of a large cache, rows of a long pass.

Computed in 32 bits they wrap, and read or write somewhere else. Of such a memory only the pages
that are written take room. The checks of races are off: they keep 8 bytes for each byte.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pdx.kernels.batch import RequestGroup
from pdx.kernels.decisions import expert_config
from pdx.kernels.expert_linear import expert_linear
from pdx.kernels.expert_order import expert_order
from pdx.kernels.mla_decode import mla_decode
from pdx.kernels.mla_decode_float8 import mla_decode_float8
from pdx.kernels.mla_kv_append import mla_kv_append
from pdx.kernels.paged_decode import paged_decode
from pdx.kernels.paged_prefill import paged_prefill
from pdx.kernels.reference.mla_attention import mla_attention
from pdx.kernels.reference.mla_record import unpack_records
from pdx.kernels.reference.paged_attention import paged_attention
from pdx.kernels.rope_kv_append import rope_kv_append
from tests.kernels.triton.cases import DEVICE, assert_near, on_device, one_group
from tests.kernels.triton.checked import without_race_checks

BF16 = torch.bfloat16
#: The last one lies past 2^31 elements.
PAGES = [17_999, 3]


@pytest.fixture(autouse=True)
def _unfilled_and_unwatched() -> Iterator[None]:
    torch.utils.deterministic.fill_uninitialized_memory = False
    with without_race_checks():
        yield
    torch.utils.deterministic.fill_uninitialized_memory = True


def huge(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    memory = torch.empty(shape, dtype=dtype, device=DEVICE)
    assert memory.numel() > 2**31
    return memory


def group(num_rows: int) -> RequestGroup:
    return on_device(one_group(64, [(100 - num_rows, num_rows, PAGES)]))


@pytest.mark.parametrize(("attend", "num_rows"), [(paged_decode, 1), (paged_prefill, 3)])
def test_attention_over_far_pages(attend: object, num_rows: int) -> None:
    context = torch.randn(2, 8, 2, 64, 128, dtype=BF16)
    kv = huge(18_000, 8, 2, 64, 128)
    kv[PAGES] = context.to(DEVICE)
    q = torch.randn(num_rows, 8, 128, dtype=BF16)
    out = attend(q.to(DEVICE), kv, group(num_rows), 0.1)
    batch = one_group(64, [(100 - num_rows, num_rows, [0, 1])])
    assert_near(out, paged_attention(q.double(), context.double(), batch, 0.1))


def test_latents_in_far_pages() -> None:
    context = torch.randn(2, 64, 576, dtype=BF16)
    kv = huge(60_000, 64, 576)
    kv[[59_999, 3]] = context.to(DEVICE)
    q = torch.randn(1, 4, 576, dtype=BF16)
    far = on_device(one_group(64, [(99, 1, [59_999, 3])]))
    out = mla_decode(q.to(DEVICE), kv, far, 0.05, 512)
    batch = one_group(64, [(99, 1, [0, 1])])
    assert_near(out, mla_attention(q.double(), context.double(), batch.decodes, 0.05, 512))


def test_records_in_far_pages() -> None:
    """Written by the append, read by the decode; offsets count bytes, and scales of four."""
    kv = huge(60_000, 64, 656, dtype=torch.uint8)
    far, latents = [59_999, 3], torch.randn(100, 576, dtype=BF16)
    pages = torch.tensor([far[n // 64] for n in range(100)], device=DEVICE)
    offsets, angles = torch.arange(100, device=DEVICE) % 64, torch.zeros(100, 32, device=DEVICE)
    parts = latents.to(DEVICE).split([512, 64], dim=1)
    mla_kv_append(*parts, angles.cos(), angles.sin(), kv, pages, offsets)
    q = torch.randn(1, 4, 576, dtype=BF16)
    out = mla_decode_float8(
        q.to(DEVICE),
        kv,
        on_device(one_group(64, [(99, 1, far)])),
        0.05,
        512,
    )
    meant = unpack_records(kv[far].cpu(), 512).double()
    near = one_group(64, [(99, 1, [0, 1])])
    # Past the context lie no records; the reference does not look there.
    assert_near(out, mla_attention(q.double(), meant, near.decodes, 0.05, 512))
    assert_near(meant.flatten(0, 1)[:100].float(), latents.double(), 0.05)


def test_latents_are_appended_to_far_pages() -> None:
    kv, latents = huge(60_000, 64, 576), torch.randn(1, 576, dtype=BF16)
    page, offset = (torch.tensor([n], device=DEVICE) for n in (59_999, 63))
    angles = torch.zeros(1, 32, device=DEVICE)
    parts = latents.to(DEVICE).split([512, 64], dim=1)
    mla_kv_append(*parts, angles.cos(), angles.sin(), kv, page, offset)
    assert torch.equal(kv[59_999, 63].cpu(), latents[0])


def test_experts_whose_weights_lie_far_apart() -> None:
    """256 experts of 7168 x 4096 are 7.5 x 10^9 weights."""
    weights, x = torch.randn(3, 64, 32, dtype=BF16), torch.randn(2, 32, dtype=BF16)
    far = huge(2**31 + 2048).as_strided((3, 64, 32), (2**30, 32, 1))
    far.copy_(weights.to(DEVICE))
    ids, config = torch.tensor([[2, 0], [1, 2]]), expert_config(90, 4, 3, BF16, BF16)
    order = expert_order(ids.to(DEVICE), 3, config.block_m)
    out = expert_linear(x.to(DEVICE), far, order, config, 4)
    expected = [
        x[pair // 2].double() @ weights[e].double().T for pair, e in enumerate([2, 0, 1, 2])
    ]
    assert_near(out, torch.stack(expected))


def test_append_to_far_pages() -> None:
    kv = huge(18_000, 8, 2, 64, 128)
    k, angles = torch.randn(1, 8, 128, dtype=BF16), torch.zeros(1, 64)
    page, offset = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (17_999, 0))
    x = k.to(DEVICE)
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    rope_kv_append(x[:, :0], x, x, cos, sin, kv, page, offset)
    assert torch.equal(kv[17_999, :, 0, 0].cpu(), k[0])
    assert torch.equal(kv[17_999, :, 1, 0].cpu(), k[0])


@pytest.mark.parametrize("attend", [paged_decode, paged_prefill])
def test_rows_that_lie_far_apart(attend: object) -> None:
    """The offset of a row is its number times a stride: 131,072 tokens of 128 heads are enough."""
    context, q = torch.randn(2, 1, 2, 64, 128, dtype=BF16), torch.randn(3, 1, 128, dtype=BF16)
    far = huge(2**31 + 128).as_strided((3, 1, 128), (2**30, 128, 1))
    far.copy_(q.to(DEVICE))
    near_pages = on_device(one_group(64, [(97, 3, [0, 1])]))
    out = attend(far, context.to(DEVICE), near_pages, 0.1)
    batch = one_group(64, [(97, 3, [0, 1])])
    assert_near(out, paged_attention(q.double(), context.double(), batch, 0.1))
