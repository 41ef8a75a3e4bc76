"""MLA with float8 records, and the append of latents in both forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdx.kernels.batch import ForwardBatch
from pdx.kernels.mla_decode_float8 import mla_decode_float8
from pdx.kernels.mla_kv_append import mla_kv_append
from pdx.kernels.mla_record import LatentParts, record_bytes
from pdx.kernels.reference.mla_attention import mla_attention
from pdx.kernels.reference.mla_record import pack_records, unpack_records
from pdx.kernels.reference.rope import rope, rope_interleaved
from tests.kernels.triton.cases import DEVICE, PagedCase, assert_near, more

#: Every byte of a poisoned record is 0xFF: NaN as float8, float32 and bfloat16.
POISON = 0xFF


def records_of(latents: Tensor, latent_dim: int) -> Tensor:
    """[P, S, R + E] as records [P, S, record], NaN as poison."""
    num_pages, page_size, width = latents.shape
    flat = latents.flatten(0, 1)
    packed = pack_records(flat[:, :latent_dim], flat[:, latent_dim:])
    packed[flat.isnan().any(dim=1)] = POISON
    assert packed.shape[1] == record_bytes(latent_dim, width - latent_dim)
    return packed.view(num_pages, page_size, -1)


def compare(
    steps: list[tuple[int, int]],
    *,
    num_heads: int = 16,
    dims: tuple[int, int] = (64, 16),
    page_size: int = 16,
    num_splits: int | None = 2,
    size: float = 1.0,
) -> None:
    torch.manual_seed(0)
    case = PagedCase(steps, page_size)
    latents = case.latents(sum(dims), torch.float32)
    latents[..., : dims[0]] *= size
    records = records_of(latents, dims[0])
    q = torch.randn(case.num_tokens, num_heads, sum(dims))
    q[..., : dims[0]] /= size
    q = q.bfloat16()
    out = mla_decode_float8(
        q.to(DEVICE), records.to(DEVICE), case.group, 0.1, dims[0], num_splits=num_splits
    )
    meant = unpack_records(records, dims[0]).double()
    assert_near(out, mla_attention(q.double(), meant, case.batch.decodes, 0.1, dims[0]))


@pytest.mark.parametrize("num_splits", [1, 2, *more(None)])
def test_decode_equals_the_reference(num_splits: int | None) -> None:
    compare([(0, 1), (15, 1), (16, 1), (95, 1)], num_splits=num_splits)


@pytest.mark.parametrize("num_heads", [24, *more(1, 128)])
def test_decode_heads(num_heads: int) -> None:
    compare([(0, 1), (40, 1)], num_heads=num_heads)


@pytest.mark.parametrize("page_size", [1, *more(64)])
def test_decode_page_sizes(page_size: int) -> None:
    compare([(63, 1), (70, 1)], page_size=page_size)


def test_decode_of_a_models_size() -> None:
    compare([(70, 1)], dims=(512, 64), page_size=64)


def test_decode_of_several_rows_is_causal_among_them() -> None:
    compare([(0, 2), (31, 4), (64, 1)], num_heads=12, num_splits=3)


@pytest.mark.parametrize("size", [3e-3, 3e3])
def test_scales_far_from_one(size: float) -> None:
    """Small ones must not drown in float16, large ones not overflow it."""
    compare([(40, 1)], size=size)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("form", ["bfloat16", "record"])
@pytest.mark.parametrize("dims", [(64, 16), (512, 64)], ids=str)
def test_append_stores_latents_and_turned_keys(
    dims: tuple[int, int], form: str, interleaved: bool
) -> None:
    torch.manual_seed(0)
    latent_dim, rope_dim = dims
    batch = ForwardBatch.build(16, [(0, 1, [3]), (15, 3, [0, 5])])
    pages, offsets = batch.token_pages, batch.token_offsets
    fused = torch.randn(len(pages), sum(dims)).bfloat16()
    fused[1, :16] = 0
    angles = torch.rand(len(pages), rope_dim // 2) * 100
    cos, sin = angles.cos(), angles.sin()
    turn = rope_interleaved if interleaved else rope
    latent, turned = fused[:, :latent_dim], turn(fused[:, None, latent_dim:], cos, sin)[:, 0]
    if form == "record":
        expected = torch.full((7, 16, record_bytes(*dims)), POISON, dtype=torch.uint8)
        kv = expected.to(DEVICE, copy=True)
        expected[pages, offsets] = pack_records(latent, turned)
    else:
        expected = torch.full((7, 16, sum(dims)), float("nan"), dtype=torch.bfloat16)
        kv = expected.to(DEVICE, copy=True)
        expected[pages, offsets] = torch.cat([latent, turned], dim=1)
    on_device = fused.to(DEVICE)
    mla_kv_append(
        on_device[:, :latent_dim],
        on_device[:, latent_dim:],
        cos.to(DEVICE),
        sin.to(DEVICE),
        kv,
        pages.to(DEVICE),
        offsets.to(DEVICE),
        interleaved=interleaved,
    )
    actual = kv.cpu()
    if form == "record":
        unwritten = torch.ones(7, 16, dtype=torch.bool)
        unwritten[pages, offsets] = False
        assert bool((actual[unwritten] == POISON).all())
        # Others read these records too: a scale is the largest value's, not any that fits.
        scales, theirs = (LatentParts.of(x, latent_dim).scale for x in (actual, expected))
        torch.testing.assert_close(scales[pages, offsets], theirs[pages, offsets])
        actual, expected = (
            unpack_records(x[pages, offsets][None], latent_dim) for x in (actual, expected)
        )
    # One rounding to bfloat16, or one step of float8 where a quotient is rounded another way.
    near = {"rtol": 0.13 if form == "record" else 2e-2, "atol": 2e-2, "equal_nan": True}
    torch.testing.assert_close(actual.float(), expected.float(), **near)
