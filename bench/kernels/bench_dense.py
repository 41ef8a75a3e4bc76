"""Matrix products, experts and norms on a GPU, beside torch's and a copy of the same run.

A row for each shape: the median time, its bytes per second as a share of what a copy of the same
run reaches, and torch's time: `linear` (cuBLAS), `bmm` with the tokens spread evenly over all
experts, and the norm in plain operations. Without a GPU it says so and ends.

    python bench/kernels/bench_dense.py            rows go to bench/results/dense.csv
    python bench/kernels/bench_dense.py --toy      small shapes, no row
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.kernels.bench_attention import copy_gb_per_s, median_us
from bench.rows import append_row

DTYPE = torch.bfloat16
FLOAT8 = torch.float8_e4m3fn
Call = Callable[[], object]
#: Op, shape, bytes, operations, ours, torch's.
Case = tuple[str, str, int, int, Call, Call]


def values(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda").div(float(shape[-1]) ** 0.5)


def products(rows: int, outputs: int, inputs: int) -> Iterator[Case]:
    from pdx.kernels.linear import linear, linear_float8, split_counters
    from pdx.kernels.quantize_rows import quantize_rows

    x, weight = values(rows, inputs), values(outputs, inputs)
    shape, flops = f"{rows} x {outputs} x {inputs}", 2 * rows * outputs * inputs
    sides = 2 * rows * (inputs + outputs)
    counters = split_counters(x.device)

    def torchs() -> object:
        return torch.nn.functional.linear(x, weight)

    yield (
        *("linear", shape, sides + 2 * weight.numel(), flops),
        lambda: linear(x, weight, counters=counters),
        torchs,
    )
    narrow = weight.to(FLOAT8)
    scale = torch.ones(-(-outputs // 128), -(-inputs // 128), device="cuda")
    num_bytes = sides + weight.numel()
    yield (
        *("linear_float8", shape, num_bytes, flops),
        lambda: linear_float8(x, narrow, scale, counters=counters),
        torchs,
    )
    yield (
        *("linear_float8 both", shape, num_bytes, flops),
        lambda: _both(linear_float8, *quantize_rows(x), narrow, scale, counters),
        torchs,
    )


def _both(
    call: Callable[..., object], x: Tensor, x_scale: Tensor, w: Tensor, scale: Tensor, n: Tensor
) -> object:
    return call(x, w, scale, x_scale=x_scale, dtype=DTYPE, counters=n)


def experts(tokens: int, num: int, chosen: int, hidden: int, inner: int) -> Iterator[Case]:
    from pdx.kernels.expert_mlp import expert_mlp

    x, gate_up, down = (
        values(tokens, hidden),
        values(num, 2 * inner, hidden),
        values(num, hidden, inner),
    )
    ids = torch.rand(tokens, num, device="cuda").topk(chosen, dim=-1).indices
    weights = torch.full(ids.shape, 1 / chosen, device="cuda")
    even = values(num, max(1, tokens * chosen // num), hidden)
    used = len(set(ids.flatten().tolist()))
    pairs = 2 * tokens * hidden + 2 * tokens * chosen * (3 * inner + hidden)

    def torchs() -> object:
        gate, up = torch.bmm(even, gate_up.transpose(1, 2)).chunk(2, dim=-1)
        return torch.bmm(torch.nn.functional.silu(gate) * up, down.transpose(1, 2))

    yield (
        "experts",
        f"{tokens} of {num}/{chosen} x {hidden} x {inner}",
        2 * (used * 3 * hidden * inner + pairs),
        2 * tokens * chosen * 3 * hidden * inner,
        lambda: expert_mlp(x, weights, ids, gate_up, down),
        torchs,
    )


def norms(rows: int, size: int) -> Iterator[Case]:
    from pdx.kernels.rms_norm import add_rms_norm

    x, y, weight = values(rows, size), values(rows, size), values(size)

    def torchs() -> object:
        total = x + y
        return torch.nn.functional.rms_norm(total, (size,), weight, 1e-6)

    yield (
        *("norm of sum", f"{rows} x {size}", 8 * rows * size, 5 * rows * size),
        lambda: add_rms_norm(x, y, weight, 1e-6),
        torchs,
    )


def samples(rows: int, width: int) -> Iterator[Case]:
    from pdx.kernels.sampling import SamplingTensors, sample

    logits = torch.randn(rows, width, device="cuda") * 3
    wide = torch.ones(rows, dtype=torch.float64, device="cuda")
    whole = torch.zeros(rows, dtype=torch.int64, device="cuda")
    for name, top_p in (("", 1.0), (" top-p", 0.95)):
        sampling = SamplingTensors(
            temperature=wide,
            top_k=whole.int(),
            top_p=wide * top_p,
            min_p=wide * 0,
            seed=whole,
            output_idx=whole,
        )
        yield (
            *(f"sample{name}", f"{rows} x {width}", 4 * rows * width, 0),
            lambda sampling=sampling: sample(logits, sampling),  # type: ignore[misc]
            lambda: torch.multinomial(torch.softmax(logits, dim=-1), 1),
        )


def cases(toy: bool) -> Iterator[Case]:
    if toy:
        yield from products(3, 256, 512)
        yield from experts(5, 8, 2, 128, 64)
        yield from norms(7, 256)
        yield from samples(2, 1000)
        return
    for rows in (1, 16, 64, 4096):
        for outputs, inputs in ((6144, 4096), (24576, 4096), (4096, 12288)):
            yield from products(rows, outputs, inputs)
    for tokens in (1, 16, 64, 1024, 8192):
        yield from experts(tokens, 128, 8, 2048, 768)
    for rows in (64, 8192):
        yield from norms(rows, 4096)
    yield from samples(64, 151936)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="small shapes, no row")
    toy = parser.parse_args().toy
    if not torch.cuda.is_available():
        print("no GPU: `pdx bench kernels --offline` has bounds", file=sys.stderr)
        return 0
    copy = copy_gb_per_s()
    print(f"copy: {copy:.0f} GB/s")
    for op, shape, num_bytes, flops, ours, torchs in cases(toy):
        own_us, torch_us = median_us(ours), median_us(torchs)
        row = {
            "op": op,
            "shape": shape,
            "us": f"{own_us:.1f}",
            "torch_us": f"{torch_us:.1f}",
            "of_copy": f"{num_bytes / own_us / 1e3 / copy:.3f}",
            "tflops": f"{flops / own_us / 1e6:.1f}",
            "gpu": torch.cuda.get_device_name(),
        }
        print(row)
        if not toy:
            append_row("dense", {**row, "copy_gb_per_s": f"{copy:.0f}"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
