"""The interpreter's repairs and checks find what they are there for."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.triton.cases import DEVICE
from tests.kernels.triton.checked import MemoryFault, RaceFault

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="about the interpreter")
RAW = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@triton.jit
def _cast(x_ptr, y_ptr, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    tl.store(y_ptr + n, tl.load(x_ptr + n).to(y_ptr.dtype.element_ty))


@triton.jit
def _arithmetic(x_ptr, y_ptr, sums_ptr, z_ptr, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + n), tl.load(y_ptr + n)
    tl.store(z_ptr + n, x * y + x)
    tl.store(z_ptr + BLOCK + n, tl.where(x > y, -x, x - y))
    tl.store(sums_ptr, tl.sum(x, 0))


@triton.jit
def _dot(x_ptr, y_ptr, z_ptr, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    at = n[:, None] * BLOCK + n[None, :]
    tl.store(z_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))


@triton.jit
def _store_at(x_ptr, offset, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(x_ptr + offset + tl.arange(0, BLOCK) * STRIDE, tl.zeros((BLOCK,), tl.float32))


@triton.jit
def _last_adds(x_ptr, count_ptr, sum_ptr, SEM: tl.constexpr):
    program = tl.program_id(0)
    tl.store(x_ptr + program, program + 1)
    arrived = tl.atomic_add(count_ptr, 1, sem=SEM)
    if arrived == tl.num_programs(0) - 1:
        tl.store(sum_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, 4)), 0))


@triton.jit
def _promise(x_ptr, offset):
    tl.store(x_ptr + tl.multiple_of(offset, 16), 1.0)


def numbers(count: int) -> Tensor:
    """Sizes from subnormal to huge, both signs."""
    return torch.randn(count) * 2.0 ** torch.randint(-20, 12, (count,))


@pytest.mark.parametrize("dtype", RAW, ids=str)
def test_casts_round_to_the_nearest_even(dtype: torch.dtype) -> None:
    x = torch.cat([numbers(1000), torch.tensor([0.0, -0.0, float("nan")] + [1e-9] * 21)])
    y, back = torch.empty(1024, dtype=dtype), torch.empty(1024)
    _cast[(1,)](x, y, BLOCK=1024)
    limit = torch.finfo(dtype).max
    assert torch.equal(y.view(torch.int8), x.clamp(-limit, limit).to(dtype).view(torch.int8))
    _cast[(1,)](y, back, BLOCK=1024)
    torch.testing.assert_close(back, y.float(), rtol=0, atol=0, equal_nan=True)


def test_bfloat16_arithmetic_is_torchs() -> None:
    x, y = numbers(256).bfloat16(), numbers(256).bfloat16()
    z, total = torch.empty(512, dtype=torch.bfloat16), torch.empty(1, dtype=torch.bfloat16)
    _arithmetic[(1,)](x, y, total, z, BLOCK=256)
    assert torch.equal(z[:256], x * y + x)
    assert torch.equal(z[256:], torch.where(x > y, -x, x - y))
    torch.testing.assert_close(total[0], x.float().sum().bfloat16(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, *RAW], ids=str)
def test_dot_multiplies_numbers_not_bits(dtype: torch.dtype) -> None:
    x, y, z = (torch.randn(32, 32).to(dtype) for _ in range(3))
    z = torch.empty(32, 32)
    _dot[(1,)](x, y, z, BLOCK=32)
    torch.testing.assert_close(z, x.float() @ y.float(), rtol=1e-5, atol=1e-5)


def test_dot_that_no_gpu_has_is_refused() -> None:
    x = torch.zeros(8, 8, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        _dot[(1,)](x, x, torch.zeros(8, 8), BLOCK=8)


@pytest.mark.parametrize("offset", [-1, 1, 2**31])
def test_access_outside_the_tensor_is_found(offset: int) -> None:
    with pytest.raises(MemoryFault):
        _store_at[(1,)](torch.zeros(16), offset, STRIDE=1, BLOCK=16)


@pytest.mark.parametrize(("grid", "stride"), [((2,), 1), ((1,), 0)])
def test_two_writers_of_one_place_are_found(grid: tuple[int], stride: int) -> None:
    with pytest.raises(RaceFault):
        _store_at[grid](torch.zeros(16), 0, STRIDE=stride, BLOCK=16)


def test_release_and_acquire_order_programs() -> None:
    x, count, total = (torch.zeros(n, dtype=torch.int32) for n in (4, 1, 1))
    _last_adds[(4,)](x, count, total, SEM="acq_rel")
    assert int(total) == 10
    with pytest.raises(RaceFault):
        _last_adds[(4,)](x, torch.zeros_like(count), total, SEM="relaxed")


def test_programs_run_in_another_order() -> None:
    """A kernel that relies on the order of its programs would be found."""
    orders = set()
    for _ in range(3):
        order, count = (torch.zeros(n, dtype=torch.int32) for n in (4, 1))
        _arrive[(4,)](order, count)
        orders.add(tuple(order.tolist()))
    assert len(orders) > 1


@triton.jit
def _arrive(order_ptr, count_ptr):
    tl.store(order_ptr + tl.program_id(0), tl.atomic_add(count_ptr, 1))


def test_false_promise_of_divisibility_is_found() -> None:
    _promise[(1,)](torch.zeros(64), 32)
    with pytest.raises(MemoryFault, match="no multiple"):
        _promise[(1,)](torch.zeros(64), 33)
