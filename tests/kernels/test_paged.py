"""KV append and paged attention: places, page edges, grouped heads, nothing unwritten is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pdx.kernels.batch import ForwardBatch
from pdx.kernels.cpu.kv_append import kv_append as cpu_kv_append
from pdx.kernels.cpu.paged_attention import paged_attention as cpu_paged_attention
from pdx.kernels.cpu.rope_kv_append import rope_kv_append as cpu_rope_kv_append
from pdx.kernels.reference.kv_append import kv_append
from pdx.kernels.reference.paged_attention import paged_attention
from pdx.kernels.reference.rope_kv_append import rope_kv_append

S, D = 4, 8
AppendOp = Callable[[Tensor, Tensor, Tensor, ForwardBatch], None]
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
    [(7, 1), (6, 1), (5, 1), (4, 1), (0, 5)],
    [(60, 1), (0, 1), (1, 1), (S, 1), (59, 1), (2, 1), (3, 2)],
    [(90, 1), (0, 1)],
]
HEADS = [(1, 1), (4, 4), (6, 2), (3, 1)]
# Against float64: roundings of the dtype on outputs of size 1. fp16 and bf16 also round the softmax
# weights where torch's fused attention keeps them in the dtype.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
IMPLEMENTATIONS: list[Callable[[Tensor, Tensor, ForwardBatch, float], Tensor]] = [
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
        decode_rows: int = 1,
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
        self.batch = self._batch(requests, decode_rows)

    def _batch(self, requests: list[tuple[int, int]], decode_rows: int) -> ForwardBatch:
        pairs = zip(requests, self.tables, strict=True)
        return ForwardBatch.build(S, [(*r, table) for r, table in pairs], decode_rows=decode_rows)

    def append_all(self) -> None:
        """What earlier passes computed, then this pass's tokens."""
        before = [(0, computed) for computed, _ in self.requests]
        cached = [computed for computed, _ in self.requests]
        kv_append(
            torch.cat([k[:c] for k, c in zip(self.k, cached, strict=True)]),
            torch.cat([v[:c] for v, c in zip(self.v, cached, strict=True)]),
            self.kv,
            self._batch(before, decode_rows=1 << 20),
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
    implementation: Callable[[Tensor, Tensor, ForwardBatch, float], Tensor],
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
    implementation: Callable[[Tensor, Tensor, ForwardBatch, float], Tensor],
) -> None:
    out = implementation(
        torch.empty(0, 4, D), torch.zeros(3, 2, 2, S, D), ForwardBatch.build(S, []), 1.0
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
    append(torch.empty(0, 1, D), torch.empty(0, 1, D), kv, ForwardBatch.build(S, []))
    assert kv.isnan().all()


@pytest.mark.parametrize("head_dim", [16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_groups", [1, 3, 16, 17])
def test_decode_steps_of_long_contexts(num_groups: int, dtype: torch.dtype, head_dim: int) -> None:
    """The sizes that the native code takes, and one past them; scores of size 10 and more."""
    case = Case([(700, 1), (3, 1), (0, 1), (64, 2)], 2 * num_groups, 2, dtype, head_dim)
    case.append_all()
    scale = 8 / head_dim**0.5
    out = cpu_paged_attention(case.q, case.kv, case.batch, scale)
    # Rounding a score of 40 changes its weight by 2e-6 of itself.
    tolerance = max(TOLERANCE[dtype], 1e-5)
    torch.testing.assert_close(out.double(), case.expected(scale), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head_dim", [12, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts_are_rows_of_a_request_that_decodes(dtype: torch.dtype, head_dim: int) -> None:
    """Natively, and in sizes that the native code does not take."""
    requests = [(40, 3), (0, 2), (9, 1), (3, 5)]
    case = Case(requests, 6, 2, dtype, head_dim, decode_rows=3)
    case.append_all()
    assert [len(group) for group in case.batch.groups] == [3, 1]
    out = cpu_paged_attention(case.q, case.kv, case.batch, 0.3)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), case.expected(0.3), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{"window": 3}, {"soft_cap": 0.5}], ids=str)
def test_windows_and_soft_caps_are_not_dropped(options: dict[str, Any]) -> None:
    case = Case([(9, 1), (7, 6)], 4, 2, torch.float32, 16)
    case.append_all()
    plain = cpu_paged_attention(case.q, case.kv, case.batch, 0.3)
    out = cpu_paged_attention(case.q, case.kv, case.batch, 0.3, **options)
    assert torch.equal(out, paged_attention(case.q, case.kv, case.batch, 0.3, **options))
    assert not torch.allclose(out, plain, atol=1e-3)


def test_float8_memory_keeps_its_scales() -> None:
    case = Case([(9, 1), (7, 6)], 4, 2, torch.float32, 16)
    angles = torch.rand(7, 8)
    scales = (0.5, 3.0)
    memories = []
    for append in (rope_kv_append, cpu_rope_kv_append):
        kv = torch.zeros(case.kv.shape, dtype=torch.float8_e4m3fn)
        append(*case.new(), angles.cos(), angles.sin(), kv, case.batch, kv_scales=scales)
        memories.append(kv)
    reference, kv = memories
    assert torch.equal(kv.view(torch.uint8), reference.view(torch.uint8))
    out = cpu_paged_attention(case.q, kv, case.batch, 0.3, kv_scales=scales)
    assert torch.equal(out, paged_attention(case.q, kv, case.batch, 0.3, kv_scales=scales))


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
