"""Other libraries' attention on the same problem: torch's, FlashInfer, FlashAttention.

Each gets the memory in the layout that it asks for, laid out before the clock starts. FlashInfer
reads pages as this project does; torch and FlashAttention have each context in one piece. Sources:
the libraries' documentation (FlashInfer 0.2 and up, FlashAttention 2 and 3).
"""

from __future__ import annotations

import importlib
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from pdx.lab.kernels.case import Absent, Call, Maker
from pdx.lab.kernels.problem import PAGE_SIZE, PagedProblem

__all__ = ["attention_others", "latent_others"]

#: FlashInfer keeps its plan and the parts of contexts there.
_WORKSPACE_BYTES = 384 << 20


def attention_others(problem: PagedProblem) -> dict[str, Maker]:
    """Other libraries' attention over grouped heads."""
    return {
        "torch": lambda: _torch(problem),
        "flashinfer": lambda: _flashinfer(problem),
        "flash-attn": lambda: _flash_attn(problem),
    }


def latent_others(problem: PagedProblem, latent_dim: int) -> dict[str, Maker]:
    """Other libraries' attention of absorbed heads over latents, one row a request."""
    return {
        "torch": lambda: _torch_latent(problem, latent_dim),
        "flashinfer": lambda: _flashinfer_latent(problem, latent_dim),
    }


def _module(*names: str) -> Any:
    """The first that is installed."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise Absent("not installed")


def _uniform(problem: PagedProblem) -> tuple[int, int]:
    """Tokens cached and new of every request."""
    if len(set(problem.requests)) > 1:
        raise Absent("its contexts have one length")
    return problem.requests[0]


def _in_dtype(problem: PagedProblem) -> Tensor:
    """Float8 as what its bytes mean: the same numbers, twice the bytes."""
    return problem.unpaged().to(problem.q.dtype)


def _torch(problem: PagedProblem) -> Call:
    cached, new = _uniform(problem)
    k, v = _in_dtype(problem).unbind(2)
    _, num_heads, head_dim = problem.q.shape
    q = problem.q.view(-1, new, num_heads, head_dim).transpose(1, 2).contiguous()
    # Rows are the context's last tokens, so the mask's corner is the lower right one.
    mask = causal_lower_right(new, cached + new) if cached and new > 1 else None

    def call() -> Tensor:
        out = scaled_dot_product_attention(
            *(q, k, v, mask),
            is_causal=new > 1 and not cached,
            scale=problem.scale,
            enable_gqa=True,
        )
        return out.transpose(1, 2)

    return call


def _flash_attn(problem: PagedProblem) -> Call:
    _, new = _uniform(problem)
    attend = _module("flash_attn_interface", "flash_attn").flash_attn_with_kvcache
    k, v = (part.transpose(1, 2).contiguous() for part in _in_dtype(problem).unbind(2))
    q = problem.q.view(-1, new, *problem.q.shape[1:])
    lengths = _int32(problem.contexts, q.device)

    def call() -> Tensor:
        out: Tensor = attend(
            *(q, k, v), cache_seqlens=lengths, softmax_scale=problem.scale, causal=True
        )
        return out

    return call


def _flashinfer(problem: PagedProblem) -> Call:
    library = _module("flashinfer")
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=problem.q.device)
    table, last = _pages_of(problem), [(c - 1) % PAGE_SIZE + 1 for c in problem.contexts]
    heads = problem.q.shape[1], problem.kv.shape[1], problem.q.shape[2], PAGE_SIZE
    lengths = _int32(last, problem.q.device)
    dtypes = {"q_data_type": problem.q.dtype, "kv_data_type": problem.kv.dtype}
    if all(new == 1 for _, new in problem.requests):
        # Without it each query head reads K and V again.
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=True
        )
        wrapper.plan(*table, lengths, *heads, sm_scale=problem.scale, **dtypes)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(
            *(_row_starts(problem), *table, lengths, *heads),
            causal=True,
            sm_scale=problem.scale,
            **dtypes,
        )
    kv = problem.kv.transpose(1, 2).contiguous()  # [P, 2, Hkv, S, D]

    def call() -> Tensor:
        out: Tensor = wrapper.run(problem.q, kv)
        return out

    return call


def _flashinfer_latent(problem: PagedProblem, latent_dim: int) -> Call:
    library = _module("flashinfer.mla")
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=problem.q.device)
    wrapper = library.BatchMLAPagedAttentionWrapper(workspace)
    starts, indices = _pages_of(problem)
    wrapper.plan(
        qo_indptr=_row_starts(problem),
        kv_indptr=starts,
        kv_indices=indices,
        kv_len_arr=_int32(problem.contexts, problem.q.device),
        num_heads=problem.q.shape[1],
        head_dim_ckv=latent_dim,
        head_dim_kpe=problem.q.shape[2] - latent_dim,
        page_size=PAGE_SIZE,
        causal=True,
        sm_scale=problem.scale,
        q_data_type=problem.q.dtype,
        kv_data_type=problem.kv.dtype,
    )
    parts = {
        "q_nope": problem.q[..., :latent_dim].contiguous(),
        "q_pe": problem.q[..., latent_dim:].contiguous(),
        "ckv_cache": problem.kv[..., :latent_dim].contiguous(),
        "kpe_cache": problem.kv[..., latent_dim:].contiguous(),
    }

    def call() -> Tensor:
        out: Tensor = wrapper.run(**parts)
        return out

    return call


def _torch_latent(problem: PagedProblem, latent_dim: int) -> Call:
    """Two batched products: torch's own attention would copy the latents for every head."""
    _uniform(problem)
    latents = problem.unpaged()  # [B, C, R + E]

    def call() -> Tensor:
        scores = torch.bmm(problem.q, latents.transpose(1, 2)) * problem.scale
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(latents.dtype)
        return torch.bmm(weights, latents[..., :latent_dim])

    return call


def _pages_of(problem: PagedProblem) -> tuple[Tensor, Tensor]:
    """Where each request's pages begin, and all pages: int32 [B + 1] and [P]."""
    device = problem.q.device
    starts = _starts([len(table) for table in problem.tables], device)
    return starts, _int32([page for table in problem.tables for page in table], device)


def _row_starts(problem: PagedProblem) -> Tensor:
    return _starts([new for _, new in problem.requests], problem.q.device)


def _starts(counts: list[int], device: torch.device) -> Tensor:
    return _int32(list(accumulate(counts, initial=0)), device)


def _int32(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
