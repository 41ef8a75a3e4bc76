"""RoPE and the paged append: values, places, nothing else touched."""

from __future__ import annotations

import pytest
import torch

from pdx.kernels.kv_view import FLOAT8
from pdx.kernels.reference.kv_append import kv_append
from pdx.kernels.reference.rope import rope, rope_interleaved
from pdx.kernels.rope_kv_append import rope_kv_append
from tests.kernels.triton.cases import DEVICE, DTYPES, one_group

NAN = float("nan")
BATCH = [(0, 1, [3]), (15, 3, [0, 5]), (32, 1, [2, 6, 1])]
#: Of values of size 1 to 4; a compiler fuses multiplications and additions, which may change how a
#: result is rounded.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((40, 20), 80), ((0, 1), 16)])
def test_turns_and_stores(
    interleaved: bool, dtype: torch.dtype, heads: tuple[int, int], head_dim: int
) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads = heads
    batch = one_group(16, BATCH)
    num_tokens = len(batch.token_pages)
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = torch.rand(num_tokens, head_dim // 2) * 100
    cos, sin = angles.cos(), angles.sin()
    kv = torch.full((7, num_kv_heads, 2, 16, head_dim), NAN, dtype=dtype)
    on_device = kv.to(DEVICE, copy=True)
    out = rope_kv_append(
        *fused.to(DEVICE).split([num_heads, num_kv_heads, num_kv_heads], dim=1),
        cos.to(DEVICE),
        sin.to(DEVICE),
        on_device,
        batch.token_pages.to(DEVICE),
        batch.token_offsets.to(DEVICE),
        interleaved=interleaved,
    )
    q, k, v = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    turn = rope_interleaved if interleaved else rope
    kv_append(turn(k, cos, sin), v, kv, batch)
    near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype], "equal_nan": True}
    torch.testing.assert_close(out.cpu(), turn(q, cos, sin), **near)
    torch.testing.assert_close(on_device.cpu(), kv, **near)


def test_float8_divides_by_the_static_scales_and_saturates() -> None:
    k = torch.linspace(-2000, 2000, 64).view(1, 1, 64).bfloat16()
    kv = torch.zeros(1, 1, 2, 4, 64).to(DEVICE, FLOAT8)
    one, zero = torch.ones(1, 32, device=DEVICE), torch.zeros(1, 32, device=DEVICE)
    page, offset = (torch.tensor([n], device=DEVICE) for n in (0, 2))
    x = k.to(DEVICE)
    rope_kv_append(x[:, :0], x, x, one, zero, kv, page, offset, kv_scales=(2.0, 4.0))
    expected = torch.stack([k[0, 0].float() / 2, k[0, 0].float() / 4]).clamp(-448, 448).to(FLOAT8)
    assert torch.equal(kv[0, 0, :, 2].cpu().float(), expected.float())
    assert not kv[0, 0, :, [0, 1, 3]].float().any()


def test_padding_is_not_stored() -> None:
    kv = torch.full((2, 1, 2, 4, 16), NAN, device=DEVICE)
    x, angles = torch.ones(2, 1, 16, device=DEVICE), torch.zeros(2, 8, device=DEVICE)
    pages, offsets = torch.tensor([-1, 1], device=DEVICE), torch.tensor([3, 3], device=DEVICE)
    rope_kv_append(x, x, x, angles.cos(), angles.sin(), kv, pages, offsets)
    assert int((~kv.isnan()).sum()) == 2 * 16
    assert bool((kv[1, :, :, 3] == 1).all())


def test_no_tokens() -> None:
    kv = torch.full((2, 1, 2, 4, 16), NAN, device=DEVICE)
    x, angles = torch.ones(0, 1, 16, device=DEVICE), torch.zeros(0, 8, device=DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert rope_kv_append(x, x, x, angles, angles, kv, none, none).shape == (0, 1, 16)
    assert bool(kv.isnan().all())
