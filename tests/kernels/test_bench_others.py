"""What other libraries are given: doubles of them compute attention from their arguments alone.

None of them is installed where there is no GPU. The doubles have the parts of the interfaces that
the benches use, by name, and check shapes and dtypes as the libraries' documentation states them.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pdx.kernels.batch import ForwardBatch
from pdx.kernels.kv_view import FLOAT8
from pdx.kernels.reference.mla_attention import mla_attention
from pdx.kernels.reference.paged_attention import paged_attention
from pdx.lab.kernels.case import Absent
from pdx.lab.kernels.others import attention_others, latent_others
from pdx.lab.kernels.problem import PAGE_SIZE, PagedProblem, shuffled_tables

HEADS, KV_HEADS, DIM = 6, 2, 32
LATENT, ROPE = 32, 16
UNIFORM, MIXED = ((70, 1), (70, 1)), ((63, 1), (64, 1), (200, 1))
CHUNKS = ((70, 5), (70, 5))


def problem(requests: tuple[tuple[int, int], ...], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    tables = shuffled_tables(requests)
    return PagedProblem(
        q=torch.randn(sum(new for _, new in requests), HEADS, DIM),
        kv=torch.randn(sum(map(len, tables)), KV_HEADS, 2, PAGE_SIZE, DIM).to(dtype),
        requests=requests,
        tables=tables,
        scale=0.2,
    )


def batch_of(each: PagedProblem) -> ForwardBatch:
    pairs = zip(each.requests, each.tables, strict=True)
    return ForwardBatch.build(
        PAGE_SIZE, [(*request, table) for request, table in pairs], decode_rows=0
    )


def check(each: PagedProblem, name: str) -> None:
    out = attention_others(each)[name]()()
    expected = paged_attention(each.q, each.kv.float(), batch_of(each), each.scale)
    torch.testing.assert_close(out.reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("requests", [UNIFORM, CHUNKS, ((0, 70),)], ids=str)
def test_torch(requests: tuple[tuple[int, int], ...]) -> None:
    check(problem(requests), "torch")


def test_torch_of_float8_has_the_numbers_that_it_means() -> None:
    check(problem(UNIFORM, FLOAT8), "torch")


@pytest.mark.parametrize("name", ["torch", "flash-attn"])
def test_contexts_of_several_lengths_are_for_paged_libraries(name: str) -> None:
    with pytest.raises(Absent, match="one length"):
        attention_others(problem(MIXED))[name]()


@pytest.mark.parametrize("name", ["flashinfer", "flash-attn"])
def test_library_that_is_not_installed_says_so(name: str) -> None:
    with pytest.raises(Absent, match="not installed"):
        attention_others(problem(UNIFORM))[name]()


def rows_of(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [n, Hq, D] over k, v [C, Hkv, D], causal from the end."""
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("nhd,chd->hnc", q, k) * scale
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    return torch.einsum("hnc,chd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


class FlashInfer:
    """Both paged wrappers: HND pages [P, 2, Hkv, S, D], rows [T, Hq, D]."""

    def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert layout == "HND"
        self.options = options

    def _tables(self, indptr: Tensor, indices: Tensor, last: Tensor, *sizes: int) -> None:
        assert {x.dtype for x in (indptr, indices, last)} == {torch.int32}
        assert sizes == (HEADS, KV_HEADS, DIM, PAGE_SIZE)
        assert bool(((last >= 1) & (last <= PAGE_SIZE)).all())
        self.pages = [indices[a:b].long() for a, b in pairwise(indptr.tolist())]
        self.last = last.tolist()

    def run(self, q: Tensor, kv: Tensor) -> Tensor:
        assert kv.is_contiguous()
        assert kv.shape[1:] == (2, KV_HEADS, PAGE_SIZE, DIM)
        assert (q.dtype, kv.dtype) == (self.dtypes["q_data_type"], self.dtypes["kv_data_type"])
        outs = []
        for i, (pages, last) in enumerate(zip(self.pages, self.last, strict=True)):
            k, v = kv[pages].permute(1, 0, 3, 2, 4).flatten(1, 2)
            context = (len(pages) - 1) * PAGE_SIZE + last
            rows = q[self.rows[i] : self.rows[i + 1]]
            outs.append(rows_of(rows, k[:context], v[:context], self.scale))
        return torch.cat(outs)


class Decode(FlashInfer):
    def plan(self, *tables: Any, sm_scale: float, **dtypes: torch.dtype) -> None:
        assert self.options == {"use_tensor_cores": True}
        self._tables(*tables)
        self.rows = list(range(len(self.pages) + 1))
        self.scale, self.dtypes = sm_scale, dtypes


class Prefill(FlashInfer):
    def plan(
        self, rows: Tensor, *tables: Any, causal: bool, sm_scale: float, **dtypes: torch.dtype
    ) -> None:
        assert causal
        self._tables(*tables)
        self.rows, self.scale, self.dtypes = rows.tolist(), sm_scale, dtypes


@pytest.mark.parametrize(
    ("requests", "dtype"),
    [(UNIFORM, torch.float32), (MIXED, torch.float32), (MIXED, FLOAT8), (CHUNKS, torch.float32)],
    ids=str,
)
def test_flashinfer(
    requests: tuple[tuple[int, int], ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Decode, BatchPrefillWithPagedKVCacheWrapper=Prefill
    )
    monkeypatch.setitem(sys.modules, "flashinfer", double)
    check(problem(requests, dtype), "flashinfer")


@pytest.mark.parametrize("module", ["flash_attn", "flash_attn_interface"])
@pytest.mark.parametrize("requests", [UNIFORM, CHUNKS], ids=str)
def test_flash_attention(
    requests: tuple[tuple[int, int], ...], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        softmax_scale: float,
        causal: bool,
    ) -> Tensor:
        """q [B, n, Hq, D], caches [B, C, Hkv, D]."""
        assert causal
        assert cache_seqlens.dtype == torch.int32
        parts = zip(q, k_cache, v_cache, cache_seqlens.tolist(), strict=True)
        return torch.stack([rows_of(r, k[:n], v[:n], softmax_scale) for r, k, v, n in parts])

    double = SimpleNamespace(flash_attn_with_kvcache=attend)
    monkeypatch.setitem(sys.modules, module, double)
    check(problem(requests), "flash-attn")


class Latent:
    def __init__(self, workspace: Tensor) -> None:
        assert workspace.dtype == torch.uint8

    def plan(self, **plan: Any) -> None:
        self.plan_ = SimpleNamespace(**plan)
        assert (plan["head_dim_ckv"], plan["head_dim_kpe"]) == (LATENT, ROPE)
        assert (plan["num_heads"], plan["page_size"]) == (HEADS, PAGE_SIZE)

    def run(self, *, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor) -> Tensor:
        plan, outs = self.plan_, []
        kv = torch.cat([ckv_cache, kpe_cache], dim=-1)
        q = torch.cat([q_nope, q_pe], dim=-1)
        for i, context in enumerate(plan.kv_len_arr.tolist()):
            pages = plan.kv_indices[plan.kv_indptr[i] : plan.kv_indptr[i + 1]].long()
            keys = kv[pages].flatten(0, 1)[:context, None]
            rows = q[plan.qo_indptr[i] : plan.qo_indptr[i + 1]]
            outs.append(rows_of(rows, keys, keys[..., :LATENT], plan.sm_scale))
        return torch.cat(outs)


@pytest.mark.parametrize(
    ("name", "requests"), [("torch", UNIFORM), ("flashinfer", UNIFORM), ("flashinfer", MIXED)]
)
def test_latents(
    name: str, requests: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    double = SimpleNamespace(BatchMLAPagedAttentionWrapper=Latent)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", double)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(mla=double))
    torch.manual_seed(0)
    tables = shuffled_tables(requests)
    each = PagedProblem(
        q=torch.randn(len(requests), HEADS, LATENT + ROPE),
        kv=torch.randn(sum(map(len, tables)), PAGE_SIZE, LATENT + ROPE),
        requests=requests,
        tables=tables,
        scale=0.2,
    )
    out = latent_others(each, LATENT)[name]()()
    expected = mla_attention(each.q, each.kv, batch_of(each).chunks, each.scale, LATENT)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
