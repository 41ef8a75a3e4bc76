"""Products, experts, norms and sampling on the shapes of models, beside torch's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from pdx.kernels.expert_mlp import expert_mlp
from pdx.kernels.kv_view import FLOAT8
from pdx.kernels.linear import linear, linear_float8, split_counters
from pdx.kernels.quantize_rows import quantize_rows
from pdx.kernels.rms_norm import add_rms_norm
from pdx.kernels.sampling import sample
from pdx.lab.kernels.case import Call, Case

__all__ = ["dense_cases"]

BF16 = torch.bfloat16
#: Sums in another order, and one rounding; with both sides in float8, two of three bits.
_TOLERANCE, _FLOAT8_TOLERANCE = 1e-2, 0.1


def dense_cases(device: torch.device, toy: bool) -> Iterator[Case]:
    """All of them; ``toy``: small ones, which the interpreter can run."""
    if toy:
        yield from _products(3, 256, 512, device)
        yield _experts(5, (8, 2), 128, 64, device)
        yield _norm(7, 256, device)
        yield from _samples(2, 1000, device)
        return
    for rows in (1, 16, 64, 4096):
        for outputs, inputs in ((6144, 4096), (24576, 4096), (4096, 12288)):
            yield from _products(rows, outputs, inputs, device)
    for tokens in (16, 64, 1, 1024, 8192):
        yield _experts(tokens, (128, 8), 2048, 768, device)
    for rows in (64, 8192):
        yield _norm(rows, 4096, device)
    yield from _samples(64, 151936, device)


def _products(rows: int, outputs: int, inputs: int, device: torch.device) -> Iterator[Case]:
    x, weight = _values(rows, inputs, device=device), _values(outputs, inputs, device=device)
    narrow = (weight * 64).to(FLOAT8)  # far from float8's smallest numbers
    scale = torch.full((-(-outputs // 128), -(-inputs // 128)), 1 / 64, device=device)
    counters = split_counters(device)
    sides = 2 * rows * (inputs + outputs)

    def case(op: str, weight_bytes: int, ours: Call, other: Tensor, tolerance: float) -> Case:
        return Case(
            op=op,
            shape=f"{rows} x {outputs} x {inputs}",
            num_bytes=sides + weight_bytes * weight.numel(),
            flops=2 * rows * outputs * inputs,
            ours=ours,
            others={"torch": lambda: partial(torch.nn.functional.linear, x, other)},
            tolerance=tolerance,
        )

    yield case(
        *("linear", 2),
        lambda: linear(x, weight, counters=counters),
        *(weight, _TOLERANCE),
    )
    meant = (narrow.float() / 64).to(BF16)
    yield case(
        *("linear float8", 1),
        lambda: linear_float8(x, narrow, scale, counters=counters),
        *(meant, _TOLERANCE),
    )

    def both() -> Tensor:
        quantized, x_scale = quantize_rows(x)
        return linear_float8(
            quantized, narrow, scale, x_scale=x_scale, dtype=BF16, counters=counters
        )

    yield case("linear both float8", 1, both, meant, _FLOAT8_TOLERANCE)


def _experts(
    tokens: int, of: tuple[int, int], hidden: int, inner: int, device: torch.device
) -> Case:
    """torch's has the same number of pairs, spread evenly over all experts."""
    num, chosen = of
    x = _values(tokens, hidden, device=device)
    gate_up = _values(num, 2 * inner, hidden, device=device)
    down = _values(num, hidden, inner, device=device)
    ids = torch.rand(tokens, num, device=device).topk(chosen, dim=-1).indices
    weights = torch.full(ids.shape, 1 / chosen, device=device)
    used = len(set(ids.flatten().tolist()))
    pairs = 2 * tokens * hidden + 2 * tokens * chosen * (3 * inner + hidden)

    def torchs() -> Call:
        even = _values(num, max(1, tokens * chosen // num), hidden, device=device)

        def call() -> Tensor:
            gate, up = torch.bmm(even, gate_up.transpose(1, 2)).chunk(2, dim=-1)
            return torch.bmm(torch.nn.functional.silu(gate) * up, down.transpose(1, 2))

        return call

    return Case(
        op="experts",
        shape=f"{tokens} of {num}/{chosen} x {hidden} x {inner}",
        num_bytes=2 * (used * 3 * hidden * inner + pairs),
        flops=2 * tokens * chosen * 3 * hidden * inner,
        ours=lambda: expert_mlp(x, weights, ids, gate_up, down),
        others={"torch": torchs},
    )


def _norm(rows: int, size: int, device: torch.device) -> Case:
    x, y = _values(rows, size, device=device), _values(rows, size, device=device)
    weight = _values(size, device=device)

    def torchs() -> Call:
        return lambda: torch.nn.functional.rms_norm(x + y, (size,), weight, 1e-6)

    return Case(
        op="norm of sum",
        shape=f"{rows} x {size}",
        num_bytes=8 * rows * size,
        flops=5 * rows * size,
        ours=lambda: add_rms_norm(x, y, weight, 1e-6)[1],
        others={"torch": torchs},
        tolerance=_TOLERANCE,
    )


def _samples(rows: int, width: int, device: torch.device) -> Iterator[Case]:
    """torch's draws other tokens, and has no filter."""
    logits = torch.randn(rows, width, device=device) * 3
    wide = torch.ones(rows, dtype=torch.float64, device=device)
    whole = torch.zeros(rows, dtype=torch.int64, device=device)
    for name, top_p in (("sample", 1.0), ("sample top-p", 0.95)):
        # Temperature, top-k, top-p, min-p, seed, index of the output token.
        sampling = (wide, whole.int(), wide * top_p, wide * 0, whole, whole)
        yield Case(
            op=name,
            shape=f"{rows} x {width}",
            num_bytes=4 * rows * width,
            flops=0,
            ours=partial(sample, logits, *sampling),
            others={"torch": lambda: lambda: _multinomial(logits)},
        )


def _multinomial(logits: Tensor) -> Tensor:
    return torch.multinomial(torch.softmax(logits, dim=-1), 1)


def _values(*shape: int, device: torch.device) -> Tensor:
    """Products of rows of them have a size of about 1."""
    return torch.randn(shape, dtype=BF16, device=device).div(float(shape[-1]) ** 0.25)
