"""RMSNorm, rope and SiLU-mul against formulas written out in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pdx.kernels.cpu.rms_norm import rms_norm as cpu_rms_norm
from pdx.kernels.cpu.rope import rope as cpu_rope
from pdx.kernels.cpu.silu_mul import silu_mul as cpu_silu_mul
from pdx.kernels.reference.rms_norm import rms_norm
from pdx.kernels.reference.rope import rope
from pdx.kernels.reference.silu_mul import silu_mul

# A few roundings of the dtype's epsilon on values of size 1 to 8.
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.bfloat16: 6e-2,
    torch.float16: 8e-3,
}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)
rows = pytest.mark.parametrize("num_rows", [0, 1, 7, 301])
NormOp = Callable[[Tensor, Tensor, float], Tensor]
RopeOp = Callable[[Tensor, Tensor, Tensor], Tensor]
SiluOp = Callable[[Tensor, Tensor], Tensor]
norms = pytest.mark.parametrize("norm", [rms_norm, cpu_rms_norm], ids=["reference", "cpu"])
ropes = pytest.mark.parametrize("turn", [rope, cpu_rope], ids=["reference", "cpu"])
silus = pytest.mark.parametrize("gated", [silu_mul, cpu_silu_mul], ids=["reference", "cpu"])


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    torch.testing.assert_close(
        actual.to(torch.float64), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@norms
@dtypes
@rows
@pytest.mark.parametrize("size", [1, 5, 128])
def test_rms_norm(norm: NormOp, dtype: torch.dtype, num_rows: int, size: int) -> None:
    x, weight = torch.randn(num_rows, size, dtype=dtype), torch.randn(size, dtype=dtype)
    wide = x.to(torch.float64)
    expected = wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + 1e-5) * weight.to(torch.float64)
    before = x.clone()
    close(norm(x, weight, 1e-5), expected, dtype)
    assert torch.equal(x, before)


@norms
def test_rms_norm_of_zeros_is_kept_finite_by_eps(norm: NormOp) -> None:
    zeros = torch.zeros(2, 8)
    assert torch.equal(norm(zeros, torch.ones(8), 1e-6), zeros)


@norms
def test_rms_norm_adds_up_in_float32(norm: NormOp) -> None:
    # 300^2 overflows float16.
    x = torch.full((1, 8), 300.0, dtype=torch.float16)
    normed = norm(x, torch.ones(8, dtype=torch.float16), 1e-6)
    assert torch.allclose(normed.float(), torch.ones(8))


@ropes
@dtypes
@rows
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 2), (3, 8)])
def test_rope_turns_each_pair_of_halves(
    turn: RopeOp, dtype: torch.dtype, num_rows: int, num_heads: int, head_dim: int
) -> None:
    x = torch.randn(num_rows, num_heads, head_dim, dtype=dtype)
    half = head_dim // 2
    angles = torch.randn(num_rows, half, dtype=torch.float64)
    expected = x.to(torch.float64, copy=True)
    for row in range(num_rows):
        for i in range(half):
            c, s = math.cos(angles[row, i]), math.sin(angles[row, i])
            a, b = expected[row, :, i].clone(), expected[row, :, i + half].clone()
            expected[row, :, i], expected[row, :, i + half] = a * c - b * s, a * s + b * c
    angles_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = angles.cos().to(angles_dtype), angles.sin().to(angles_dtype)
    before = x.clone()
    close(turn(x, cos, sin), expected, dtype)
    assert torch.equal(x, before)


@silus
@dtypes
@rows
def test_silu_mul(gated: SiluOp, dtype: torch.dtype, num_rows: int) -> None:
    gate, up = torch.randn(2, num_rows, 33, dtype=dtype)
    wide = gate.to(torch.float64)
    expected = wide / (1 + torch.exp(-wide)) * up.to(torch.float64)
    before = gate.clone()
    close(gated(gate, up), expected, dtype)
    assert torch.equal(gate, before)


@silus
def test_silu_mul_of_extreme_gates_is_finite(gated: SiluOp) -> None:
    gate = torch.tensor([-200.0, 200.0])
    assert torch.equal(gated(gate, torch.ones(2)), torch.tensor([0.0, 200.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 65, 1000])
def test_native_ops_round_as_the_reference_does(dtype: torch.dtype, num_rows: int) -> None:
    """float32 sums differ in their order; what is rounded to bfloat16 is the same but for those."""
    x, weight = torch.randn(num_rows, 576, dtype=dtype), torch.randn(576, dtype=dtype)
    ours, theirs = cpu_rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5)
    assert float((ours != theirs).double().mean()) < (1e-3 if dtype == torch.bfloat16 else 1)
    torch.testing.assert_close(
        ours, theirs, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=0
    )
    q, angles = torch.randn(num_rows, 9, 64, dtype=dtype), torch.randn(num_rows, 32)
    assert torch.equal(cpu_rope(q, angles.cos(), angles.sin()), rope(q, angles.cos(), angles.sin()))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_ops_hide_nothing_broken(dtype: torch.dtype, value: float) -> None:
    x = torch.ones(2, 32, dtype=dtype)
    x[1, 3] = value
    normed = cpu_rms_norm(x, torch.ones(32, dtype=dtype), 1e-5)
    assert normed[0].isfinite().all()
    assert normed[1, 3].isnan()
    turned = cpu_rope(x.view(2, 1, 32), torch.ones(2, 16), torch.zeros(2, 16))
    assert not turned[1, 0, 3].isfinite()
