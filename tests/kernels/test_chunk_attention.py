"""Chunks of prompts on AMX: shapes whose pages its tiles read where they lie, in bfloat16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pdx.kernels.batch import ForwardBatch
from pdx.kernels.cpu.native_ops import has_amx
from pdx.kernels.cpu.paged_attention import paged_attention, paged_attention_without_amx
from pdx.kernels.reference.paged_attention import paged_attention as reference

NAN = float("nan")
# Outputs are of size 4 at most, where bfloat16's last place is 2^-6; softmax weights are rounded
# to it as well.
TOLERANCE = 2e-2
AttentionOp = Callable[[Tensor, Tensor, ForwardBatch, float], Tensor]
IMPLEMENTATIONS: list[AttentionOp] = [paged_attention, paged_attention_without_amx]


def paged(
    page_size: int, kv_heads: int, dim: int, contexts: list[int]
) -> tuple[Tensor, list[list[int]]]:
    """Random K and V of some requests in shuffled pages of poisoned memory, and their tables."""
    num_pages = [-(-context // page_size) for context in contexts]
    shuffled = torch.randperm(sum(num_pages) + 2).tolist()
    tables = [[shuffled.pop() for _ in range(n)] for n in num_pages]
    kv = torch.full((sum(num_pages) + 2, kv_heads, 2, page_size, dim), NAN, dtype=torch.bfloat16)
    for context, table in zip(contexts, tables, strict=True):
        for token in range(context):
            kv[table[token // page_size], :, :, token % page_size] = torch.randn(kv_heads, 2, dim)
    return kv, tables


def batch_of(
    page_size: int, requests: list[tuple[int, int]], tables: list[list[int]]
) -> ForwardBatch:
    rows = [(*request, table) for request, table in zip(requests, tables, strict=True)]
    return ForwardBatch.build(page_size, rows)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("page_size", "num_heads", "kv_heads", "dim"),
    [
        (16, 12, 4, 64),
        (32, 2, 2, 128),
        (48, 3, 1, 32),
        (16, 2, 1, 96),
        (16, 1, 1, 256),
        (8, 2, 1, 64),
    ],
)
@pytest.mark.parametrize(
    "requests",
    [
        [(0, 2), (0, 15), (0, 16), (0, 17)],
        [(5, 1), (15, 2), (16, 16), (31, 33)],
        [(0, 257), (255, 2), (256, 17), (500, 40)],
    ],
    ids=str,
)
def test_chunks_equal_the_reference_and_read_nothing_unwritten(
    implementation: AttentionOp,
    page_size: int,
    num_heads: int,
    kv_heads: int,
    dim: int,
    requests: list[tuple[int, int]],
) -> None:
    kv, tables = paged(page_size, kv_heads, dim, [before + new for before, new in requests])
    q = torch.randn(sum(new for _, new in requests), num_heads, dim).bfloat16()
    batch = batch_of(page_size, requests, tables)
    expected = reference(q.double(), kv.double(), batch, dim**-0.5)
    actual = implementation(q, kv, batch, dim**-0.5).double()
    assert float((actual - expected).abs().amax()) < TOLERANCE


@pytest.mark.skipif(not has_amx(), reason="this CPU has no AMX")
def test_on_amx_a_tokens_bits_depend_on_its_context_alone() -> None:
    kv, tables = paged(16, 2, 64, [401])
    q = torch.randn(401, 6, 64).bfloat16()
    whole = paged_attention(q, kv, batch_of(16, [(0, 401)], tables), 0.125)
    for begin, end in [(0, 7), (7, 40), (40, 300), (300, 401)]:
        part = batch_of(16, [(begin, end - begin)], [tables[0][: -(-end // 16)]])
        assert torch.equal(paged_attention(q[begin:end], kv, part, 0.125), whole[begin:end])
    torch.set_num_threads(2)
    assert torch.equal(paged_attention(q, kv, batch_of(16, [(0, 401)], tables), 0.125), whole)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", [0, 1], ids=["key", "value"])
def test_nan_within_a_context_is_hidden_from_nobody_who_sees_it(
    implementation: AttentionOp, kind: int
) -> None:
    kv, tables = paged(16, 1, 32, [40])
    kv[tables[0][0], 0, kind, 3, 5] = NAN
    q = torch.randn(40, 2, 32).bfloat16()
    out = implementation(q, kv, batch_of(16, [(0, 40)], tables), 0.2)
    assert out[3:].isnan().any(dim=-1).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scores_far_apart_stay_finite(implementation: AttentionOp) -> None:
    kv, tables = paged(16, 1, 64, [600])
    q = (torch.randn(600, 1, 64) * 300).bfloat16()
    batch = batch_of(16, [(0, 600)], tables)
    expected = reference(q.double(), kv.double(), batch, 0.5)
    actual = implementation(q, kv, batch, 0.5).double()
    assert float((actual - expected).abs().amax()) < TOLERANCE
