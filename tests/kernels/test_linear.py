"""Linear layers: every way of computing them, at the numbers of rows where one takes over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pdx.kernels.cpu.linear import linear as cpu_linear
from pdx.kernels.cpu.linear import linear_without_amx
from pdx.kernels.cpu.native_ops import has_amx
from pdx.kernels.reference.linear import linear

# Against float64: one rounding to the dtype of outputs up to 16 in size, whose halves of a unit in
# the last place are 4e-7, 2^-5 and 2^-8; float32 also adds up with errors of its own.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}


@pytest.mark.parametrize(
    "implementation",
    [linear, cpu_linear, linear_without_amx],
    ids=["reference", "cpu", "without AMX"],
)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 63, 64, 65, 130, 300])
@pytest.mark.parametrize(
    ("in_size", "out_size"), [(96, 40), (33, 1), (1, 17), (300, 203), (544, 64)]
)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_rows_are_the_formulas(
    implementation: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    dtype: torch.dtype,
    num_rows: int,
    in_size: int,
    out_size: int,
    has_bias: bool,
) -> None:
    x = torch.randn(num_rows, in_size).to(dtype)
    weight = (torch.randn(out_size, in_size) / in_size**0.5).to(dtype)
    bias = torch.randn(out_size).to(dtype) if has_bias else None
    before = x.clone()
    y = implementation(x, weight, bias)
    assert (y.dtype, y.shape) == (dtype, (num_rows, out_size))
    assert y.is_contiguous()
    assert torch.equal(x, before)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert float((y.double() - expected).abs().amax() if num_rows else 0) < TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", [cpu_linear, linear_without_amx])
def test_a_row_among_few_has_the_bits_that_it_has_alone(
    implementation: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> None:
    """In bfloat16, up to four rows: a stream's text does not depend on who else is there."""
    x = torch.randn(4, 300).bfloat16()
    weight = torch.randn(203, 300).bfloat16()
    together = implementation(x, weight, None)
    for num_rows in (1, 2, 3):
        assert torch.equal(implementation(x[:num_rows], weight, None), together[:num_rows])
    assert torch.equal(implementation(x[3:], weight, None), together[3:])


@pytest.mark.parametrize("in_size", [300, 544, 2304])
def test_with_amx_a_row_among_many_has_the_bits_that_it_has_alone(in_size: int) -> None:
    if not has_amx():
        pytest.skip("this CPU has no AMX")
    x = torch.randn(300, in_size).bfloat16()
    weight = torch.randn(70, in_size).bfloat16()
    together = cpu_linear(x, weight, None)
    for begin, end in [(0, 1), (7, 9), (100, 116), (283, 300), (40, 111)]:
        assert torch.equal(cpu_linear(x[begin:end], weight, None), together[begin:end])
    torch.set_num_threads(2)
    assert torch.equal(cpu_linear(x, weight, None), together)


def test_rows_and_weights_need_not_be_contiguous() -> None:
    x = torch.randn(96, 20).bfloat16().T
    weight = torch.randn(96, 40).bfloat16().T
    expected = linear(x, weight, None)
    for mine in (x, x.contiguous()):
        for its in (weight, weight.contiguous()):
            close = (cpu_linear(mine, its, None).double() - expected.double()).abs() <= 0.25
            assert close.all()  # two units in the last place of the largest


@pytest.mark.parametrize("implementation", [cpu_linear, linear_without_amx])
@pytest.mark.parametrize("num_rows", [1, 4, 5, 17, 70])
def test_nan_and_infinity_reach_the_outputs_that_they_belong_to(
    implementation: Callable[[Tensor, Tensor, Tensor | None], Tensor], num_rows: int
) -> None:
    x = torch.ones(num_rows, 64).bfloat16()
    weight = torch.ones(8, 64).bfloat16()
    weight[3, 17], weight[5, 63] = float("nan"), float("inf")
    y = implementation(x, weight, None)
    assert y.isnan().nonzero()[:, 1].tolist() == [3] * num_rows
    assert y.isinf().nonzero()[:, 1].tolist() == [5] * num_rows
