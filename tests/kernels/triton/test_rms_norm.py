"""RMSNorm with and without a residual sum, and the gate of SwiGLU: values, views, what stays."""

from __future__ import annotations

import pytest
import torch

from pdx.kernels.reference.add_rms_norm import add_rms_norm as add_reference
from pdx.kernels.reference.rms_norm import rms_norm as reference
from pdx.kernels.reference.silu_mul import silu_mul as silu_reference
from pdx.kernels.rms_norm import add_rms_norm, rms_norm
from pdx.kernels.silu_mul import silu_mul
from tests.kernels.triton.cases import DEVICE, DTYPES, assert_near, more

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
#: Rows of a head's size share a program; 7,168 is a hidden state of DeepSeek's, 5 no power of 2.
SHAPES = [(0, 16), (1, 5), (3, 2, 80), (9, 128), (2, 1536), *more((3, 7168), (33, 40, 128))]


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    out = rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5)
    assert out.dtype == dtype
    if x.numel():
        assert_near(out, reference(x.double(), weight.double(), 1e-5))
        # The specification's own roundings: at most one step of the dtype from it.
        near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
        torch.testing.assert_close(out.cpu(), reference(x, weight, 1e-5), **near)
    else:
        assert out.shape == shape


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sum_and_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, y, weight = (torch.randn(*s).to(dtype) for s in (shape, shape, shape[-1:]))
    on_device = x.to(DEVICE, copy=True)
    total, out = add_rms_norm(on_device, y.to(DEVICE), weight.to(DEVICE), 1e-5)
    assert torch.equal(on_device.cpu(), x)
    # One rounding of one sum: nothing to differ in.
    assert torch.equal(total.cpu(), x + y)
    assert out.shape == shape
    if x.numel():
        assert_near(out, add_reference(x.double(), y.double(), weight.double(), 1e-5)[1], 1e-2)
        near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
        torch.testing.assert_close(out.cpu(), add_reference(x, y, weight, 1e-5)[1], **near)


def test_norm_of_views() -> None:
    """Latents are the first columns of a projection's output."""
    fused, weight = torch.randn(7, 80).to(DEVICE), torch.randn(48).to(DEVICE)
    view = fused[:, 16:64]
    torch.testing.assert_close(rms_norm(view, weight, 1e-6), rms_norm(view.clone(), weight, 1e-6))
    total, out = add_rms_norm(view, fused[:, :48], weight, 1e-6)
    assert torch.equal(total, view + fused[:, :48])
    assert bool(out.isfinite().all())


def test_norm_of_zeros_is_kept_finite_by_eps() -> None:
    zeros = torch.zeros(2, 8, device=DEVICE)
    assert torch.equal(rms_norm(zeros, torch.ones(8, device=DEVICE), 1e-6), zeros)


def test_norm_adds_up_in_float32() -> None:
    # 300^2 overflows float16.
    x = torch.full((1, 8), 300.0, dtype=torch.float16, device=DEVICE)
    normed = rms_norm(x, torch.ones_like(x[0]), 1e-6)
    assert torch.allclose(normed.float(), torch.ones(8, device=DEVICE))


@dtypes
@pytest.mark.parametrize(
    "shape", [(0, 8), (1, 5), (2, 3, 80), (3, 1024), *more((5, 2049))], ids=str
)
def test_silu_mul(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate, up = (torch.randn(shape) * 4).to(dtype), torch.randn(shape).to(dtype)
    out = silu_mul(gate.to(DEVICE), up.to(DEVICE))
    assert (out.dtype, out.shape) == (dtype, shape)
    if gate.numel():
        assert_near(out, silu_reference(gate.double(), up.double()))
        near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
        torch.testing.assert_close(out.cpu(), silu_reference(gate, up), **near)


def test_silu_mul_of_the_halves_of_one_projection() -> None:
    fused = torch.randn(5, 96).to(DEVICE)
    gate, up = fused.chunk(2, dim=-1)
    assert torch.equal(silu_mul(gate, up), silu_mul(gate.clone(), up.clone()))


def test_silu_mul_of_large_gates_is_finite() -> None:
    gate = torch.tensor([[-1e4, -100.0, 100.0, 1e4]], device=DEVICE)
    out = silu_mul(gate, torch.ones_like(gate))
    assert out.cpu().tolist() == [[0.0, pytest.approx(0.0, abs=1e-35), 100.0, 1e4]]
