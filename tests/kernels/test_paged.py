"""KV append and paged attention: places, page edges, grouped heads, nothing unwritten is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pdx.kernels.cpu.kv_append import kv_append as cpu_kv_append
from pdx.kernels.cpu.paged_attention import paged_attention as cpu_paged_attention
from pdx.kernels.paged_batch import PagedBatch
from pdx.kernels.reference.kv_append import kv_append
from pdx.kernels.reference.paged_attention import paged_attention

S, D = 4, 8
AppendOp = Callable[[Tensor, Tensor, Tensor, PagedBatch], None]
NAN = float("nan")
# (tokens computed before, tokens of this pass) of the requests of one pass.
BATCHES = [
    [(0, 1)],
    [(0, S - 1)],
    [(0, S)],
    [(0, S + 1)],
    [(S - 1, 1)],
    [(S, 1)],
    [(S + 1, 1)],
    [(3, 2 * S)],
    [(2 * S, S)],
    [(5, 1), (0, 1), (9, 1)],
    [(5, 1), (11, 1), (0, 7), (6, 3), (S, S)],
    [(7, 1), (0, 5), (6, 1), (5, 1), (4, 1)],
    [(60, 1), (0, 1), (1, 1), (S, 1), (59, 1), (2, 1), (3, 2)],
    [(90, 1), (0, 1)],
]
HEADS = [(1, 1), (4, 4), (6, 2), (3, 1)]
# Against float64: roundings of the dtype on outputs of size 1. fp16 and bf16 also round the softmax
# weights where torch's fused attention keeps them in the dtype.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
IMPLEMENTATIONS: list[Callable[[Tensor, Tensor, PagedBatch, float], Tensor]] = [
    paged_attention,
    cpu_paged_attention,
]


class Case:
    """Requests with random K and V, in shuffled pages of poisoned memory."""

    def __init__(
        self,
        requests: list[tuple[int, int]],
        num_heads: int,
        num_kv_heads: int,
        dtype: torch.dtype,
        head_dim: int = D,
    ) -> None:
        self.requests = requests
        contexts = [computed + new for computed, new in requests]
        num_pages = [-(-context // S) for context in contexts]
        shuffled = torch.randperm(sum(num_pages) + 3).tolist()
        self.tables = [[shuffled.pop() for _ in range(n)] for n in num_pages]
        self.kv = torch.full((sum(num_pages) + 3, num_kv_heads, 2, S, head_dim), NAN, dtype=dtype)
        self.k = [torch.randn(c, num_kv_heads, head_dim, dtype=dtype) for c in contexts]
        self.v = [torch.randn(c, num_kv_heads, head_dim, dtype=dtype) for c in contexts]
        self.q = torch.randn(sum(new for _, new in requests), num_heads, head_dim, dtype=dtype)
        self.batch = self._batch(requests)

    def _batch(self, requests: list[tuple[int, int]]) -> PagedBatch:
        return PagedBatch.build(
            S, [(*r, table) for r, table in zip(requests, self.tables, strict=True)]
        )

    def append_all(self) -> None:
        """What earlier passes computed, then this pass's tokens."""
        before = [(0, computed) for computed, _ in self.requests]
        cached = [computed for computed, _ in self.requests]
        kv_append(
            torch.cat([k[:c] for k, c in zip(self.k, cached, strict=True)]),
            torch.cat([v[:c] for v, c in zip(self.v, cached, strict=True)]),
            self.kv,
            self._batch(before),
        )
        kv_append(*self.new(), self.kv, self.batch)

    def new(self) -> tuple[Tensor, Tensor]:
        cached = [computed for computed, _ in self.requests]
        return (
            torch.cat([k[c:] for k, c in zip(self.k, cached, strict=True)]),
            torch.cat([v[c:] for v, c in zip(self.v, cached, strict=True)]),
        )

    def expected(self, scale: float) -> Tensor:
        """One row and head at a time, in float64, from the unpaged K and V."""
        rows = []
        row = 0
        for request, (computed, new) in enumerate(self.requests):
            for seen in range(computed + 1, computed + new + 1):
                k, v = self.k[request][:seen].double(), self.v[request][:seen].double()
                heads = []
                for head in range(self.q.shape[1]):
                    kv_head = head // (self.q.shape[1] // k.shape[1])
                    scores = k[:, kv_head] @ self.q[row, head].double() * scale
                    heads.append(torch.softmax(scores, 0) @ v[:, kv_head])
                rows.append(torch.stack(heads))
                row += 1
        return torch.stack(rows)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=["reference", "cpu"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("requests", BATCHES, ids=str)
def test_attention_equals_the_unpaged_formula_and_reads_nothing_unwritten(
    implementation: Callable[[Tensor, Tensor, PagedBatch, float], Tensor],
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    requests: list[tuple[int, int]],
) -> None:
    case = Case(requests, num_heads, num_kv_heads, dtype)
    case.append_all()
    out = implementation(case.q, case.kv, case.batch, 0.3)
    assert out.dtype == dtype
    assert out.shape == case.q.shape
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), case.expected(0.3), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=["reference", "cpu"])
def test_attention_of_no_requests_is_empty(
    implementation: Callable[[Tensor, Tensor, PagedBatch, float], Tensor],
) -> None:
    out = implementation(
        torch.empty(0, 4, D), torch.zeros(3, 2, 2, S, D), PagedBatch.build(S, []), 1.0
    )
    assert out.shape == (0, 4, D)


def test_reference_keeps_float64() -> None:
    case = Case([(5, 3)], 4, 2, torch.float64)
    case.append_all()
    out = paged_attention(case.q, case.kv, case.batch, 0.3)
    torch.testing.assert_close(out, case.expected(0.3), rtol=1e-12, atol=1e-12)


appends = pytest.mark.parametrize("append", [kv_append, cpu_kv_append], ids=["reference", "cpu"])


@appends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("requests", BATCHES, ids=str)
def test_append_writes_its_tokens_and_nothing_else(
    append: AppendOp, dtype: torch.dtype, requests: list[tuple[int, int]]
) -> None:
    case = Case(requests, 2, 2, dtype)
    k, v = case.new()
    append(k, v, case.kv, case.batch)
    written = ~case.kv.isnan()
    assert int(written.sum()) == k.numel() + v.numel()
    row = 0
    for (computed, new), table in zip(requests, case.tables, strict=True):
        for position in range(computed, computed + new):
            page, offset = table[position // S], position % S
            assert torch.equal(case.kv[page, :, 0, offset], k[row])
            assert torch.equal(case.kv[page, :, 1, offset], v[row])
            row += 1


@appends
def test_append_of_no_tokens_changes_nothing(append: AppendOp) -> None:
    kv = torch.full((2, 1, 2, S, D), NAN)
    append(torch.empty(0, 1, D), torch.empty(0, 1, D), kv, PagedBatch.build(S, []))
    assert kv.isnan().all()


def test_spans_tell_rows_and_pages() -> None:
    batch = PagedBatch.build(S, [(5, 1, [9, 8, 7]), (0, 6, [3, 2])])
    first, second = batch.spans
    assert (first.rows, first.context_len, first.page_indices.tolist()) == (slice(0, 1), 6, [9, 8])
    assert (second.rows, second.context_len) == (slice(1, 7), 6)
    assert batch.token_pages.tolist() == [8, 3, 3, 3, 3, 2, 2]
    assert batch.token_offsets.tolist() == [1, 0, 1, 2, 3, 0, 1]


def test_decode_steps_stand_apart_from_chunks() -> None:
    batch = PagedBatch.build(S, [(5, 1, [9, 8, 7]), (0, 6, [3, 2]), (0, 1, [4])])
    steps = batch.decode_steps
    assert (steps.rows.tolist(), steps.context_lens.tolist()) == ([0, 7], [6, 1])
    assert (steps.table_starts.tolist(), steps.page_indices.tolist()) == ([0, 2], [9, 8, 4])
    assert [span.start for span in batch.chunks] == [1]


@pytest.mark.parametrize("head_dim", [16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_groups", [1, 3, 16, 17])
def test_decode_steps_of_long_contexts(num_groups: int, dtype: torch.dtype, head_dim: int) -> None:
    """The sizes that the native code takes, and one past them; scores of size 10 and more."""
    case = Case([(700, 1), (3, 1), (64, 2), (0, 1)], 2 * num_groups, 2, dtype, head_dim)
    case.append_all()
    scale = 8 / head_dim**0.5
    out = cpu_paged_attention(case.q, case.kv, case.batch, scale)
    # Rounding a score of 40 changes its weight by 2e-6 of itself.
    tolerance = max(TOLERANCE[dtype], 1e-5)
    torch.testing.assert_close(out.double(), case.expected(scale), rtol=tolerance, atol=tolerance)


def test_decode_step_over_broken_memory_is_broken() -> None:
    """It must reach the check of the logits, not be hidden by a maximum."""
    case = Case([(20, 1), (20, 1)], 4, 2, torch.float32, 16)
    case.append_all()
    case.kv[case.tables[1][2], 0, 0, 1] = NAN
    out = cpu_paged_attention(case.q, case.kv, case.batch, 0.3)
    assert not out[0].isnan().any()
    assert out[1].isnan().any()


def test_chunks_of_all_lengths_are_few_shapes_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps a kernel for each shape that its attention has ever had."""
    shapes = set()

    def recorded(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        shapes.add((q.shape, k.shape))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **arguments)

    name = "pdx.kernels.cpu.paged_attention.scaled_dot_product_attention"
    monkeypatch.setattr(name, recorded)
    for cached_len in (0, 5, 100):
        for num_tokens in range(2, 128):
            case = Case([(cached_len, num_tokens)], 2, 2, torch.bfloat16)
            case.append_all()
            cpu_paged_attention(case.q, case.kv, case.batch, 0.3)
    assert len(shapes) <= 10
