"""Matrix products: Split-K, swapped sides, many rows, float8 blocks; NaN, saturation, no rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdx.kernels import linear as linear_module
from pdx.kernels.decisions import LinearConfig, num_k_splits_for
from pdx.kernels.kv_view import FLOAT8
from pdx.kernels.linear import linear, linear_float8, split_counters
from pdx.kernels.quantize_rows import quantize_rows
from pdx.kernels.reference.linear import linear as reference
from pdx.kernels.reference.linear_float8 import dequantised_blocks
from pdx.kernels.reference.quantize_rows import quantize_rows as quantize_reference
from tests.kernels.triton.cases import DEVICE, DTYPES, assert_near

NAN = float("nan")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=["sides as they are", "swapped"])
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that few numbers make many of them."""
    config = LinearConfig(
        block_m=16,
        block_n=32,
        block_k=32,
        num_warps=4,
        num_stages=2,
        is_swapped=request.param == "swapped",
    )
    monkeypatch.setattr(linear_module, "linear_config", lambda *args: config)


@dtypes
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(("rows", "columns", "size"), [(1, 32, 96), (17, 40, 72), (70, 33, 8)])
@pytest.mark.usefixtures("small_tiles")
def test_product(rows: int, columns: int, size: int, num_splits: int, dtype: torch.dtype) -> None:
    """Also a sum shorter than its parts, which are empty then."""
    x, weight = torch.randn(rows, size).to(dtype), torch.randn(columns, size).to(dtype)
    bias = torch.randn(columns).to(dtype)
    counters = split_counters(DEVICE)
    on_device = x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE)
    out = linear(*on_device, counters=counters, num_splits=num_splits)
    assert_near(out, reference(x.double(), weight.double(), bias.double()))
    # The counters are as they were, and the sum is the same every time.
    assert not counters.any()
    assert torch.equal(out, linear(*on_device, counters=counters, num_splits=num_splits))


@dtypes
@pytest.mark.parametrize("rows", [1, 40, 70, pytest.param(300, marks=pytest.mark.slow)])
def test_product_as_the_tables_have_it(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 520).to(dtype), torch.randn(80, 520).to(dtype)
    assert_near(
        linear(x.to(DEVICE), weight.to(DEVICE)), reference(x.double(), weight.double(), None)
    )


def test_product_of_views() -> None:
    fused, weight = torch.randn(5, 96).to(DEVICE), torch.randn(8, 80).to(DEVICE)
    out = linear(fused[:, 32:], weight[:, :64])
    assert_near(out, reference(fused[:, 32:].cpu().double(), weight[:, :64].cpu().double(), None))


def test_no_rows() -> None:
    weight = torch.randn(8, 16, device=DEVICE)
    assert linear(weight[:0], weight).shape == (0, 8)
    scale = torch.ones(1, 1, device=DEVICE)
    assert linear_float8(weight[:0], weight.to(FLOAT8), scale).shape == (0, 8)
    assert quantize_rows(weight[:0])[1].shape == (0, 1)


def test_rows_and_columns_past_the_end_are_not_used() -> None:
    """What lies behind x and the weight is NaN, and so is what lies between their rows."""
    memory = torch.full((2, 64), NAN, device=DEVICE)
    memory[:, :40] = 1.0
    out = linear(memory[:1, :40], memory[:, :40], num_splits=2)
    assert out.tolist() == [[40.0, 40.0]]


@pytest.mark.parametrize(
    ("tiles", "size", "expected"),
    [(1, 128, 1), (1, 4096, 16), (8, 4096, 4), (32, 4096, 1), (3, 896, 3)],
)
def test_parts_fill_the_device_and_none_is_empty(tiles: int, size: int, expected: int) -> None:
    num_splits = num_k_splits_for(tiles, size, 64, torch.device("cpu"))
    assert num_splits == expected
    part = -(-(size // 64) // num_splits) * 64
    assert (num_splits - 1) * part < size


def float8_case(rows: int, columns: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """x float32, weight float8, scales."""
    weight = (torch.randn(columns, size) * 100).to(FLOAT8)
    scale = torch.rand(-(-columns // 128), -(-size // 128)) / 50 + 0.001
    return torch.randn(rows, size), weight, scale


@dtypes
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize(("rows", "columns", "size"), [(3, 130, 256), (70, 48, 200)])
def test_float8_weight(
    rows: int, columns: int, size: int, num_splits: int, dtype: torch.dtype
) -> None:
    x, weight, scale = float8_case(rows, columns, size)
    bias = torch.randn(columns)
    x = x.to(dtype)
    on_device = (each.to(DEVICE) for each in (x, weight, scale, bias))
    out = linear_float8(*on_device, num_splits=num_splits)
    wide = dequantised_blocks(weight, scale).double()
    assert out.dtype == dtype
    assert_near(out, reference(x.double(), wide, bias.double()))


@pytest.mark.parametrize(("rows", "columns", "size"), [(3, 130, 256), (70, 48, 200)])
def test_float8_on_both_sides(rows: int, columns: int, size: int) -> None:
    x, weight, scale = float8_case(rows, columns, size)
    values, x_scale = quantize_rows(x.to(DEVICE))
    out = linear_float8(
        values,
        weight.to(DEVICE),
        scale.to(DEVICE),
        x_scale=x_scale,
        dtype=torch.bfloat16,
        num_splits=2,
    )
    wide = dequantised_blocks(weight, scale).double()
    by_value = x_scale.cpu().double().repeat_interleave(128, 1)[:, :size]
    rounded = values.cpu().double() * by_value
    assert_near(out, reference(rounded, wide, None))
    # Rounding to 3 bits of fraction costs up to a sixteenth of a value, a fiftieth of a sum here.
    assert_near(out, reference(x.double(), wide, None), 0.05)


@dtypes
@pytest.mark.parametrize("size", [5, 128, 300, 1300])
def test_quantized_rows(size: int, dtype: torch.dtype) -> None:
    x = (torch.randn(3, size) * torch.tensor([[1e-3], [1.0], [1e4]])).to(dtype)
    x[1, :3] = 0
    values, scales = quantize_rows(x.to(DEVICE))
    expected, expected_scales = quantize_reference(x)
    torch.testing.assert_close(scales.cpu(), expected_scales, rtol=1e-6, atol=0)
    # A quotient that lies between two values may go either way: one step of 3 bits.
    torch.testing.assert_close(values.cpu().float(), expected.float(), rtol=0.13, atol=2e-3)


def test_blocks_of_zeros_and_the_largest_value() -> None:
    x = torch.zeros(1, 256, device=DEVICE)
    x[0, 200] = -3e38
    values, scales = quantize_rows(x)
    assert scales[0, 0] == 1
    assert values.float()[0, 200] == -448
    assert int((values.float() != 0).sum()) == 1


def test_nan_and_infinity_are_seen_in_the_product() -> None:
    weight, scale = torch.ones(16, 256, device=DEVICE).to(FLOAT8), torch.ones(1, 2, device=DEVICE)
    for bad in (NAN, float("inf")):
        x = torch.ones(2, 256, device=DEVICE)
        x[1, 130] = bad
        values, x_scale = quantize_rows(x)
        out = linear_float8(values, weight, scale, x_scale=x_scale, dtype=torch.float32)
        assert out[0].tolist() == [256.0] * 16
        assert not out[1].isfinite().any()
