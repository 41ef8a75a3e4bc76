"""Attention, the append and page copies on the shapes of models. One case at a time has memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdx.kernels.kv_view import FLOAT8
from pdx.kernels.mla_decode import mla_decode
from pdx.kernels.mla_decode_float8 import mla_decode_float8
from pdx.kernels.mla_prefill import mla_prefill
from pdx.kernels.paged_decode import paged_decode
from pdx.kernels.paged_prefill import paged_prefill
from pdx.kernels.reference.mla_record import pack_records
from pdx.kernels.rope_kv_append import rope_kv_append
from pdx.lab.kernels.case import Call, Case
from pdx.lab.kernels.others import attention_others, latent_others
from pdx.lab.kernels.problem import PAGE_SIZE, PagedProblem, group_on, shuffled_tables

__all__ = ["attention_cases"]

BF16 = torch.bfloat16
#: Products of bfloat16 numbers, whose weights are rounded to it; and sums in another order.
_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Requests of grouped heads."""

    requests: tuple[tuple[int, int], ...]
    heads: tuple[int, int, int]
    kv_dtype: torch.dtype = BF16

    @property
    def shape(self) -> str:
        """Requests x (cached + new), query heads / KV heads / head dim."""
        return f"{_told(self.requests)}, {'/'.join(map(str, self.heads))}"


def _told(requests: tuple[tuple[int, int], ...]) -> str:
    kinds = dict.fromkeys(requests)
    return " and ".join(f"{requests.count(r)} x ({r[0]} + {r[1]})" for r in kinds)


def _times(count: int, cached: int, new: int = 1) -> tuple[tuple[int, int], ...]:
    return ((cached, new),) * count


_LLAMA, _QWEN_TP8 = (32, 8, 128), (12, 1, 128)
_STEPS = (
    _Step(requests=_times(32, 4095), heads=_LLAMA),
    _Step(requests=_times(1, 32767), heads=_LLAMA),
    _Step(requests=_times(128, 4095), heads=_LLAMA),
    _Step(requests=_times(32, 32767), heads=_QWEN_TP8),
    _Step(requests=_times(32, 4095), heads=_LLAMA, kv_dtype=FLOAT8),
    _Step(requests=_times(1, 4095), heads=_LLAMA),
    _Step(requests=(*_times(31, 1023), *_times(1, 131071)), heads=_QWEN_TP8),
    _Step(requests=_times(32, 4092, 4), heads=_LLAMA),
)
_CHUNKS = (
    _Step(requests=_times(1, 0, 8192), heads=_LLAMA),
    _Step(requests=_times(1, 0, 2048), heads=_LLAMA),
    _Step(requests=_times(1, 65536, 2048), heads=_LLAMA),
    _Step(requests=_times(16, 0, 512), heads=_QWEN_TP8),
    _Step(requests=_times(1, 0, 8192), heads=_LLAMA, kv_dtype=FLOAT8),
)
_TOY_STEPS = (
    _Step(requests=_times(2, 99), heads=(4, 2, 64)),
    _Step(requests=((20, 1), (70, 1)), heads=(4, 2, 64)),
    _Step(requests=_times(2, 96, 4), heads=(4, 2, 64)),
    _Step(requests=_times(1, 40), heads=(4, 2, 64), kv_dtype=FLOAT8),
)
_TOY_CHUNKS = (
    _Step(requests=_times(1, 0, 70), heads=(4, 2, 64)),
    _Step(requests=_times(2, 30, 70), heads=(4, 2, 64)),
)
#: Requests, cached tokens, heads of a rank; and new tokens, heads of MLA's prefill.
_LATENT_STEPS = ((32, 4095, 16), (128, 4095, 128), (8, 32767, 16))
_LATENT_CHUNKS = ((8192, 16), (2048, 128))
#: R and E of latents; N, E and V of expanded keys and values.
_LATENTS, _EXPANDED = (512, 64), (128, 64, 128)


def attention_cases(device: torch.device, toy: bool) -> Iterator[Case]:
    """All of them; ``toy``: small ones, which the interpreter can run."""
    for step in _TOY_STEPS if toy else _STEPS:
        yield _grouped("decode", paged_decode, step, device)
    latents, expanded = ((64, 16), (32, 16, 32)) if toy else (_LATENTS, _EXPANDED)
    for batch, cached, num_heads in ((2, 70, 16),) if toy else _LATENT_STEPS:
        yield from _latent(_times(batch, cached), num_heads, latents, device)
    for chunk in _TOY_CHUNKS if toy else _CHUNKS:
        yield _grouped("prefill", paged_prefill, chunk, device)
    for new, num_heads in ((70, 2),) if toy else _LATENT_CHUNKS:
        yield _latent_prefill(new, num_heads, expanded, device)
    yield _append(3 if toy else 8192, (4, 2, 64) if toy else _LLAMA, device)


def _grouped(op: str, attend: Callable[..., Tensor], step: _Step, device: torch.device) -> Case:
    num_heads, num_kv_heads, head_dim = step.heads
    tables = shuffled_tables(step.requests)
    num_pages, num_rows = sum(map(len, tables)), sum(new for _, new in step.requests)
    kv = _values(num_pages, num_kv_heads, 2, PAGE_SIZE, head_dim, device=device)
    problem = PagedProblem(
        q=_values(num_rows, num_heads, head_dim, device=device),
        kv=kv.to(step.kv_dtype),
        requests=step.requests,
        tables=tables,
        scale=head_dim**-0.5,
    )
    group = problem.group()
    token_bytes = 2 * num_kv_heads * head_dim * problem.kv.element_size()
    return Case(
        op=op if step.kv_dtype == BF16 else f"{op} float8",
        shape=step.shape,
        num_bytes=sum(problem.contexts) * token_bytes + 4 * problem.q.numel(),
        flops=4 * _seen(step.requests) * num_heads * head_dim,
        ours=lambda: attend(problem.q, problem.kv, group, problem.scale),
        others=attention_others(problem),
        tolerance=_TOLERANCE,
    )


def _latent(
    requests: tuple[tuple[int, int], ...],
    num_heads: int,
    dims: tuple[int, int],
    device: torch.device,
) -> Iterator[Case]:
    """Over latents, and over the float8 records of the same."""
    latent_dim, width = dims[0], sum(dims)
    tables = shuffled_tables(requests)
    problem = PagedProblem(
        q=_values(len(requests), num_heads, width, device=device),
        kv=_values(sum(map(len, tables)), PAGE_SIZE, width, device=device),
        requests=requests,
        tables=tables,
        scale=(128 + dims[1]) ** -0.5,
    )
    group = problem.group()
    rows = 2 * len(requests) * num_heads * (width + latent_dim)
    wide = Case(
        op="mla decode",
        shape=f"{_told(requests)}, {num_heads} heads",
        num_bytes=2 * sum(problem.contexts) * width + rows,
        flops=2 * sum(problem.contexts) * num_heads * (width + latent_dim),
        ours=lambda: mla_decode(problem.q, problem.kv, group, problem.scale, latent_dim),
        others=latent_others(problem, latent_dim),
        tolerance=_TOLERANCE,
    )
    yield wide
    flat = problem.kv.flatten(0, 1)
    records = pack_records(flat[:, :latent_dim], flat[:, latent_dim:])
    records = records.view(len(problem.kv), PAGE_SIZE, -1)
    yield replace(
        wide,
        op="mla decode float8",
        num_bytes=sum(problem.contexts) * records.shape[2] + rows,
        ours=lambda: mla_decode_float8(problem.q, records, group, problem.scale, latent_dim),
        others={"torch": wide.others["torch"]},
        tolerance=0.1,  # what three bits of mantissa leave of the latents
    )


def _latent_prefill(
    new: int, num_heads: int, dims: tuple[int, int, int], device: torch.device
) -> Case:
    nope, rope, value = dims
    expanded = _values(new, num_heads, nope + value, device=device)
    k_rope = _values(new, rope, device=device)
    q = _values(new, num_heads, nope + rope, device=device)
    k_nope, v = expanded[..., :nope], expanded[..., nope:]
    pages = list(range(-(-new // PAGE_SIZE)))
    group = group_on(device, [(0, new, pages)])
    scale = (nope + rope) ** -0.5

    def torchs() -> Call:
        keys = torch.cat([k_nope, k_rope[:, None].expand(-1, num_heads, -1)], dim=-1)
        rows, keys, values = (x.transpose(0, 1)[None].contiguous() for x in (q, keys, v))

        def call() -> Tensor:
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(rows, keys, values, is_causal=True, scale=scale)[0].transpose(0, 1)

        return call

    return Case(
        op="mla prefill",
        shape=f"{new} new, {num_heads} heads",
        num_bytes=2 * (expanded.numel() + k_rope.numel() + q.numel() + v.numel()),
        flops=2 * _seen(((0, new),)) * num_heads * (nope + rope + value),
        ours=lambda: mla_prefill(q, k_nope, k_rope, v, group, scale),
        others={"torch": torchs},
        tolerance=_TOLERANCE,
    )


def _append(num_tokens: int, heads: tuple[int, int, int], device: torch.device) -> Case:
    num_heads, num_kv_heads, head_dim = heads
    fused = _values(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device)
    q, k, v = torch.split(fused, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    angles = torch.rand(num_tokens, head_dim // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    places = torch.randperm(-(-num_tokens // PAGE_SIZE) * PAGE_SIZE)[:num_tokens].to(device)
    pages, offsets = places // PAGE_SIZE, places % PAGE_SIZE
    kv = _values(-(-num_tokens // PAGE_SIZE), num_kv_heads, 2, PAGE_SIZE, head_dim, device=device)
    return Case(
        op="rope, append",
        shape=f"{num_tokens} tokens, {'/'.join(map(str, heads))}",
        num_bytes=2 * 2 * fused.numel() + 4 * angles.numel() * 2,
        flops=0,
        ours=lambda: rope_kv_append(q, k, v, cos, sin, kv, pages, offsets),
    )


def _seen(requests: tuple[tuple[int, int], ...]) -> int:
    """Pairs of a row and a token that it sees."""
    return sum(new * cached + new * (new + 1) // 2 for cached, new in requests)


def _values(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=BF16, device=device)
