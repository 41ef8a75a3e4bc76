"""MLA's kernels with the face of ``Ops``, which a rank runs interpreted: as their references."""

from __future__ import annotations

import pytest
import torch

from pdx.kernels import triton_ops
from pdx.kernels.reference.mla_append import mla_append
from pdx.kernels.reference.mla_attention import mla_attention, mla_prefill
from tests.kernels.triton.cases import DEVICE, PagedCase, assert_near

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="ranks run on CPUs")
LATENT, ROPE, HEADS = 32, 16, 2


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_append(interleaved: bool) -> None:
    torch.manual_seed(0)
    case = PagedCase([(3, 1), (14, 4)], 16)
    fused = torch.randn(case.num_tokens, LATENT + ROPE)
    latent, k_rope = fused[:, :LATENT], fused[:, LATENT:]
    angles = torch.rand(case.num_tokens, ROPE // 2) * 100
    actual, expected = (torch.zeros(case.num_pages, 16, LATENT + ROPE) for _ in range(2))
    for append, kv in ((triton_ops.mla_append, actual), (mla_append, expected)):
        append(latent, k_rope, angles.cos(), angles.sin(), kv, case.batch, interleaved)
    torch.testing.assert_close(actual, expected)


def test_steps_of_one_pass_after_another() -> None:
    torch.manual_seed(0)
    attend = triton_ops.mla_attention
    for requests in ([(0, 1), (40, 1)], [(17, 1)]):
        case = PagedCase(requests, 16)
        q = torch.randn(case.num_tokens, HEADS, LATENT + ROPE)
        kv = case.latents(LATENT + ROPE, torch.float32)
        for _ in range(2):  # two layers of a pass
            expected = mla_attention(q.double(), kv.double(), case.batch.decodes, 0.1, LATENT)
            assert_near(attend(q, kv, case.group, 0.1, LATENT), expected)


def test_chunks_of_one_pass_after_another() -> None:
    torch.manual_seed(0)
    attend = triton_ops.mla_prefill
    for requests in ([(0, 5), (20, 3)], [(16, 2)]):
        case = PagedCase(requests, 16)
        num_context = sum(map(sum, requests))
        q = torch.randn(case.num_tokens, HEADS, 32 + ROPE)
        k_nope, v = torch.randn(num_context, HEADS, 64).chunk(2, dim=-1)
        k_rope = torch.randn(num_context, ROPE)
        wide = (x.double() for x in (q, k_nope, k_rope, v))
        expected = mla_prefill(*wide, case.batch.decodes, 0.1)
        assert_near(attend(q, k_nope, k_rope, v, case.group, 0.1), expected)
