"""Attention kernels on a GPU: times beside torch's own attention and a copy, in the same run.

A row for each shape: the median time, and its bytes per second as a share of what a copy of the
same run reaches. torch's `scaled_dot_product_attention` has the same K and V unpaged, and no mask
where tokens are cached. Without a GPU it says so and ends.

    python bench/kernels/bench_attention.py            rows go to bench/results/attention.csv
    python bench/kernels/bench_attention.py --toy      small shapes, no row
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.rows import append_row
from pdx.kernels.page_tables import PageTables
from pdx.kernels.paged_batch import PagedBatch

PAGE_SIZE = 64
DTYPE = torch.bfloat16
#: Requests, new tokens, cached tokens, query heads, KV heads, head dim.
SHAPES = [
    (1, 1, 4096, 32, 8, 128),
    (32, 1, 4096, 32, 8, 128),
    (128, 1, 4096, 32, 8, 128),
    (1, 1, 32768, 32, 8, 128),
    (32, 1, 32768, 12, 1, 128),
    (1, 2048, 0, 32, 8, 128),
    (1, 8192, 0, 32, 8, 128),
    (1, 2048, 65536, 32, 8, 128),
]
TOY = [(2, 1, 100, 4, 2, 64), (1, 70, 30, 4, 2, 64)]


def median_us(call: Callable[[], object]) -> float:
    """Of 30 calls, the L2 cache cleared before each; times are the GPU's own."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times: list[float] = []
    for index in range(35):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        if index >= 5:
            times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def copy_gb_per_s() -> float:
    """Read and written bytes of a copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * len(source) / median_us(lambda: target.copy_(source)) / 1e3


def measure(shape: tuple[int, ...], copy: float) -> dict[str, object]:
    from pdx.kernels.paged_decode import paged_decode
    from pdx.kernels.paged_prefill import paged_prefill

    batch, new, cached, heads, kv_heads, dim = shape
    context, scale = new + cached, dim**-0.5
    num_pages = -(-context // PAGE_SIZE)
    order = torch.randperm(batch * num_pages).view(batch, num_pages).tolist()
    spans = PagedBatch.build(PAGE_SIZE, [(cached, new, pages) for pages in order]).spans
    tables = PageTables.of(spans, torch.device("cuda"))
    q = torch.randn(batch * new, heads, dim, dtype=DTYPE, device="cuda")
    kv = torch.randn(batch * num_pages, kv_heads, 2, PAGE_SIZE, dim, dtype=DTYPE, device="cuda")
    ours = paged_decode if new == 1 else paged_prefill
    own_us = median_us(lambda: ours(q, kv, tables, scale))
    torch_us = median_us(lambda: _torch_attention(q, kv, order, context, scale))
    num_bytes = 2 * (2 * batch * context * kv_heads * dim + 2 * q.numel())
    seen = batch * (new * cached + new * (new + 1) // 2)
    return {
        "op": "decode" if new == 1 else "prefill",
        "batch": batch,
        "new": new,
        "cached": cached,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "us": f"{own_us:.1f}",
        "torch_us": f"{torch_us:.1f}",
        "of_copy": f"{num_bytes / own_us / 1e3 / copy:.3f}",
        "tflops": f"{4 * seen * heads * dim / own_us / 1e6:.1f}",
        "gpu": torch.cuda.get_device_name(),
    }


def _torch_attention(
    q: Tensor, kv: Tensor, order: list[list[int]], context: int, scale: float
) -> Tensor:
    """K and V gathered once; only the attention itself is timed after the first call."""
    batch, (_, heads, dim) = len(order), q.shape
    k, v = _unpaged(kv, order, context)
    rows = q.view(batch, -1, heads, dim).transpose(1, 2)
    is_causal = rows.shape[2] == context and context > 1
    return scaled_dot_product_attention(
        rows, k, v, is_causal=is_causal, scale=scale, enable_gqa=True
    )


_gathered: dict[int, tuple[Tensor, Tensor]] = {}


def _unpaged(kv: Tensor, order: list[list[int]], context: int) -> tuple[Tensor, Tensor]:
    key = kv.data_ptr()
    if key not in _gathered:
        _gathered.clear()
        pages = kv[torch.tensor(order, device=kv.device)]  # [B, pages, Hkv, 2, S, D]
        merged = pages.permute(3, 0, 2, 1, 4, 5).flatten(3, 4)[:, :, :, :context].contiguous()
        _gathered[key] = (merged[0], merged[1])
    return _gathered[key]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="small shapes, no row")
    toy = parser.parse_args().toy
    if not torch.cuda.is_available():
        print("no GPU: `pdx bench kernels --offline` has bounds", file=sys.stderr)
        return 0
    copy = copy_gb_per_s()
    print(f"copy: {copy:.0f} GB/s")
    for shape in TOY if toy else SHAPES:
        row = measure(shape, copy)
        print(row)
        if not toy:
            append_row("attention", {**row, "copy_gb_per_s": f"{copy:.0f}"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
