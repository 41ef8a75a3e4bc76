"""Latent attention on a CPU against its reference, in float64 where the reference allows it."""

from __future__ import annotations

import pytest
import torch

from pdx.kernels.batch import ForwardBatch
from pdx.kernels.cpu.mla_attention import mla_attention as cpu_mla_attention
from pdx.kernels.cpu.mla_attention import mla_prefill as cpu_mla_prefill
from pdx.kernels.mla_record import record_bytes
from pdx.kernels.reference.mla_append import mla_append
from pdx.kernels.reference.mla_attention import mla_attention, mla_prefill
from pdx.kernels.reference.mla_contexts import mla_contexts
from pdx.kernels.reference.mla_record import unpack_records

HEADS, LATENT, ROPE, NOPE, VALUE, PAGE = 3, 16, 8, 24, 12, 4
#: Sums in another order; in bfloat16 the scores' own roundings too.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)
#: (tokens before, tokens of the pass).
SPANS = [[(0, 1)], [(3, 1), (4, 1), (0, 1)], [(0, 7), (5, 1), (4, 4), (1, 2)]]


def batch_of(spans: list[tuple[int, int]]) -> ForwardBatch:
    return ForwardBatch.build(
        PAGE,
        [(before, now, [4 * i + 2, 4 * i, 4 * i + 3]) for i, (before, now) in enumerate(spans)],
        decode_rows=7,
    )


@dtypes
@pytest.mark.parametrize("spans", SPANS, ids=str)
def test_attention_over_latents(spans: list[tuple[int, int]], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = batch_of(spans)
    group = batch.decodes
    # What nobody wrote is never read.
    kv = torch.full((16, PAGE, LATENT + ROPE), float("nan"), dtype=dtype)
    for _, seq_len, pages in group.each(PAGE):
        for place in range(seq_len):
            kv[pages[place // PAGE], place % PAGE] = torch.randn(LATENT + ROPE).to(dtype)
    q = torch.randn(len(batch), HEADS, LATENT + ROPE).to(dtype)
    expected = mla_attention(q.double(), kv.double(), group, 0.3, LATENT)
    actual = cpu_mla_attention(q, kv, group, 0.3, LATENT)
    assert (actual.dtype, actual.shape) == (dtype, expected.shape)
    assert float((actual.double() - expected).abs().max()) < TOLERANCE[dtype]


@dtypes
@pytest.mark.parametrize("spans", SPANS, ids=str)
def test_attention_over_keys_and_values(spans: list[tuple[int, int]], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = batch_of(spans)
    group = batch.decodes
    num_rows, num_context = len(batch), group.total_seq_len
    q = torch.randn(num_rows, HEADS, NOPE + ROPE).to(dtype)
    expanded = torch.randn(num_context, HEADS, NOPE + VALUE).to(dtype)
    k_nope, v = expanded[..., :NOPE], expanded[..., NOPE:]
    k_rope = torch.randn(num_context, ROPE).to(dtype)
    wide = (x.double() for x in (q, k_nope, k_rope, v))
    expected = mla_prefill(*wide, group, 0.2)
    actual = cpu_mla_prefill(q, k_nope, k_rope, v, group, 0.2)
    assert (actual.dtype, actual.shape) == (dtype, expected.shape)
    assert float((actual.double() - expected).abs().max()) < TOLERANCE[dtype]


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_append_turns_the_shared_key_by_its_pairs(interleaved: bool) -> None:
    batch = batch_of([(3, 2)])
    kv = torch.zeros(8, PAGE, 1 + 4)
    # A quarter turn of the first pair, none of the second.
    cos, sin = torch.tensor([[0.0, 1.0]] * 2), torch.tensor([[1.0, 0.0]] * 2)
    latent, key = torch.full((2, 1), 9.0), torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 2)
    mla_append(latent, key, cos, sin, kv, batch, interleaved)
    turned = [9.0, -2.0, 1.0, 3.0, 4.0] if interleaved else [9.0, -3.0, 2.0, 1.0, 4.0]
    assert kv[2, 3].tolist() == kv[0, 0].tolist() == turned
    assert int((kv != 0).any(-1).sum()) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_contexts_are_gathered_from_their_pages(dtype: torch.dtype) -> None:
    batch = batch_of([(5, 1), (0, 4), (2, 7)])
    width = LATENT + ROPE if dtype == torch.float32 else record_bytes(LATENT, ROPE)
    kv = torch.randint(0, 120, (16, PAGE, width)).to(dtype)
    expected = [kv[pages.long()].flatten(0, 1)[:n] for _, n, pages in batch.decodes.each(PAGE)]
    rows = torch.cat(expected)
    if dtype == torch.uint8:
        rows = unpack_records(rows[None], LATENT)[0]
    found = mla_contexts(kv, batch.decodes, LATENT, torch.float32)
    assert torch.equal(found, rows.float())
