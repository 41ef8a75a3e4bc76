"""Latent attention on a CPU against its reference, in float64 where the reference allows it."""

from __future__ import annotations

import pytest
import torch

from pdx.kernels.cpu.mla_attention import mla_attention as cpu_mla_attention
from pdx.kernels.cpu.mla_attention import mla_chunk_attention as cpu_mla_chunk_attention
from pdx.kernels.paged_batch import PagedBatch
from pdx.kernels.reference.mla_append import mla_append
from pdx.kernels.reference.mla_attention import mla_attention, mla_chunk_attention

HEADS, LATENT, ROPE, NOPE, VALUE, PAGE = 3, 16, 8, 24, 12, 4
#: Sums in another order; in bfloat16 the scores' own roundings too.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)
#: (tokens before, tokens of the pass).
SPANS = [[(0, 1)], [(3, 1), (4, 1), (0, 1)], [(0, 7), (5, 1), (4, 4), (1, 2)]]


def batch_of(spans: list[tuple[int, int]]) -> PagedBatch:
    return PagedBatch.build(
        PAGE,
        [(before, now, [4 * i + 2, 4 * i, 4 * i + 3]) for i, (before, now) in enumerate(spans)],
    )


@dtypes
@pytest.mark.parametrize("spans", SPANS, ids=str)
def test_attention_over_latents(spans: list[tuple[int, int]], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = batch_of(spans)
    # What nobody wrote is never read.
    kv = torch.full((16, PAGE, LATENT + ROPE), float("nan"), dtype=dtype)
    for span in batch.spans:
        for place in range(span.context_len):
            page = span.page_indices[place // PAGE]
            kv[page, place % PAGE] = torch.randn(LATENT + ROPE).to(dtype)
    q = torch.randn(len(batch.token_pages), HEADS, LATENT + ROPE).to(dtype)
    expected = mla_attention(q.double(), kv.double(), batch, 0.3, LATENT)
    actual = cpu_mla_attention(q, kv, batch, 0.3, LATENT)
    assert (actual.dtype, actual.shape) == (dtype, expected.shape)
    assert float((actual.double() - expected).abs().max()) < TOLERANCE[dtype]


@dtypes
@pytest.mark.parametrize("spans", SPANS, ids=str)
def test_attention_over_keys_and_values(spans: list[tuple[int, int]], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = batch_of(spans)
    num_rows, num_context = len(batch.token_pages), sum(span.context_len for span in batch.spans)
    q = torch.randn(num_rows, HEADS, NOPE + ROPE).to(dtype)
    expanded = torch.randn(num_context, HEADS, NOPE + VALUE).to(dtype)
    k_nope, v = expanded[..., :NOPE], expanded[..., NOPE:]
    k_rope = torch.randn(num_context, ROPE).to(dtype)
    wide = (x.double() for x in (q, k_nope, k_rope, v))
    expected = mla_chunk_attention(*wide, batch, 0.2)
    actual = cpu_mla_chunk_attention(q, k_nope, k_rope, v, batch, 0.2)
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


def test_parts_of_a_batch_are_its_steps_and_its_chunks() -> None:
    """A step with a draft is a step: its context's keys and values are not made for two rows."""
    batch = batch_of([(0, 3), (5, 1), (2, 2), (4, 3), (0, 1)])
    steps, chunks = batch.decode_part, batch.chunk_part
    assert steps.rows.tolist() == [3, 4, 5, 9]
    assert chunks.rows.tolist() == [0, 1, 2, 6, 7, 8]
    assert [span.start for span in chunks.batch.spans] == [0, 3]
    assert [span.start for span in steps.batch.spans] == [0, 1, 3]
    assert [span.context_len for span in steps.batch.spans] == [6, 4, 1]
    assert torch.equal(chunks.batch.token_pages, batch.token_pages[chunks.rows])
    assert batch.chunk_part is chunks
