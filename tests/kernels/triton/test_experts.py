"""The experts' MLPs: sort, products, sum; empty experts, all tokens at one, no tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdx.kernels.decisions import TileConfig
from pdx.kernels.expert_combine import expert_combine
from pdx.kernels.expert_linear import expert_linear
from pdx.kernels.expert_mlp import expert_mlp
from pdx.kernels.expert_order import ExpertOrder, expert_order
from pdx.kernels.kv_view import FLOAT8
from pdx.kernels.reference.expert_mlp import expert_mlp as reference
from tests.kernels.triton.cases import DEVICE, DTYPES, assert_near

#: Experts of a token: of four, of which nobody uses the last.
FEW = [[2, 0], [0, 1], [2, 1], [0, 2], [1, 0]]


def tiles(block_m: int, block_k: int = 32) -> TileConfig:
    return TileConfig(block_m=block_m, block_n=32, block_k=block_k, num_warps=4, num_stages=2)


def check_order(order: ExpertOrder, ids: Tensor, num_experts: int) -> None:
    """Each pair once, in rising order, in blocks of its expert; what is unused comes last."""
    experts = order.block_experts.tolist()
    rows = order.pairs.view(-1, order.block_m).tolist()
    num_used = sum(expert >= 0 for expert in experts)
    assert experts[:num_used] == sorted(experts[:num_used])
    assert experts[num_used:] == [-1] * (len(experts) - num_used)
    found: dict[int, list[int]] = {}
    for expert, block in zip(experts[:num_used], rows, strict=False):
        found.setdefault(expert, []).extend(block)
    flat = ids.flatten().tolist()
    for expert in range(num_experts):
        pairs = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        placed = found.get(expert, [])
        assert placed[: len(pairs)] == pairs
        assert set(placed[len(pairs) :]) <= {-1}
        assert len(placed) == -(-len(pairs) // order.block_m) * order.block_m


@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "num_experts"),
    [(1, 1, 1), (1, 8, 128), (5, 2, 6), (40, 8, 16), (300, 4, 3)],
)
def test_each_pair_has_one_place(num_tokens: int, num_chosen: int, num_experts: int) -> None:
    ids = torch.randint(num_experts, (num_tokens, num_chosen))
    check_order(expert_order(ids.to(DEVICE), num_experts, 16), ids, num_experts)


def test_all_pairs_at_one_expert_fit_and_so_does_one_pair_at_each() -> None:
    one, each = torch.full((33, 1), 5), torch.arange(8)[:, None]
    check_order(expert_order(one.to(DEVICE), 8, 16), one, 8)
    order = expert_order(each.to(DEVICE), 8, 16)
    check_order(order, each, 8)
    assert order.num_blocks == 8


def test_size_of_the_order_is_known_from_the_shapes() -> None:
    """So that a captured graph stays right: the same shapes, other experts, the same launch."""
    ids = torch.tensor(FEW)
    orders = [expert_order(x.to(DEVICE), 4, 16) for x in (ids, torch.full_like(ids, 3))]
    assert orders[0].num_blocks == orders[1].num_blocks == 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [32, 40, 96])
def test_product_of_each_pair_with_its_experts_weight(size: int, dtype: torch.dtype) -> None:
    ids = torch.tensor(FEW)
    x, weight = torch.randn(5, size).to(dtype), torch.randn(4, 48, size).to(dtype)
    weight[3] = float("nan")  # nobody's
    order = expert_order(ids.to(DEVICE), 4, 16)
    out = expert_linear(x.to(DEVICE), weight.to(DEVICE), order, tiles(16), ids.numel())
    rows = x.repeat_interleave(2, 0).double()
    expected = torch.einsum("pk,pnk->pn", rows, weight[ids.flatten()].double())
    assert_near(out, expected)
    # Down again: a row for each pair.
    back = torch.randn(4, size, 48).to(dtype)
    down = expert_linear(out, back.to(DEVICE), order, tiles(16), ids.numel())
    inner = out.cpu().double()
    assert_near(down, torch.einsum("pk,pnk->pn", inner, back[ids.flatten()].double()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [128, 200])
def test_product_with_float8_weights(size: int, dtype: torch.dtype) -> None:
    """Rows and columns that 128 does not divide have scales of their own."""
    ids = torch.tensor(FEW)
    x, weight = torch.randn(5, size).to(dtype), torch.randn(4, 144, size).to(FLOAT8)
    scale = torch.rand(4, 2, -(-size // 128)) + 0.5
    order = expert_order(ids.to(DEVICE), 4, 16)
    out = expert_linear(
        x.to(DEVICE),
        weight.to(DEVICE),
        order,
        tiles(16),
        ids.numel(),
        weight_scale=scale.to(DEVICE),
    )
    by_value = scale.repeat_interleave(128, 1)[:, :144].repeat_interleave(128, 2)[:, :, :size]
    wide = weight.double() * by_value.double()
    rows = x.repeat_interleave(2, 0).double()
    assert_near(out, torch.einsum("pk,pnk->pn", rows, wide[ids.flatten()]))


def test_both_sides_in_float8_are_scaled_by_block() -> None:
    ids, x = torch.tensor(FEW), torch.randn(5, 200).to(FLOAT8)
    weight, scale = torch.randn(4, 32, 200).to(FLOAT8), torch.rand(4, 1, 2) + 0.5
    x_scale = torch.rand(5, 2) + 0.5
    out = expert_linear(
        x.to(DEVICE),
        weight.to(DEVICE),
        expert_order(ids.to(DEVICE), 4, 16),
        tiles(16),
        ids.numel(),
        x_scale=x_scale.to(DEVICE),
        weight_scale=scale.to(DEVICE),
        dtype=torch.bfloat16,
    )
    rows = x.double() * x_scale.double().repeat_interleave(128, 1)[:, :200]
    wide = weight.double() * scale.double().repeat_interleave(128, 2)[..., :200]
    expected = torch.einsum("pk,pnk->pn", rows.repeat_interleave(2, 0), wide[ids.flatten()])
    assert_near(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(0, 8), (3, 40), (1, 1025)])
def test_combine(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    x, weights = torch.randn(num_tokens * 3, size).to(dtype), torch.rand(num_tokens, 3)
    out = expert_combine(x.to(DEVICE), weights.to(DEVICE))
    assert (out.shape, out.dtype) == ((num_tokens, size), dtype)
    if num_tokens:
        wide = x.double().view(num_tokens, 3, size)
        assert_near(out, (wide * weights.double()[..., None]).sum(1))


def mlp_case(num_tokens: int, num_chosen: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, weights, ids, gate_up, down of six experts, of which nobody uses the last."""
    ids = torch.stack([torch.randperm(5)[:num_chosen] for _ in range(num_tokens)])
    gate_up, down = torch.randn(6, 2 * 24, 48) / 7, torch.randn(6, 48, 24) / 5
    gate_up[5] = down[5] = float("nan")
    x, weights = torch.randn(num_tokens, 48), torch.rand(num_tokens, num_chosen)
    return x.to(dtype), weights, ids, gate_up.to(dtype), down.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 64])
def test_mlp(num_tokens: int, dtype: torch.dtype) -> None:
    x, weights, ids, *experts = mlp_case(num_tokens, 3, dtype)
    out = expert_mlp(*(each.to(DEVICE) for each in (x, weights, ids, *experts)))
    assert out.dtype == dtype
    wide = (each.double() for each in experts)
    # The inner values are rounded twice more.
    tolerance = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}[dtype]
    assert_near(out, reference(x.double(), weights.double(), ids, *wide), tolerance)


def test_mlp_with_all_tokens_at_one_expert() -> None:
    x, weights, ids, *experts = mlp_case(40, 1, torch.float32)
    ids[:] = 3
    out = expert_mlp(*(each.to(DEVICE) for each in (x, weights, ids, *experts)))
    assert_near(out, reference(x.double(), weights.double(), ids, *(e.double() for e in experts)))


def test_mlp_of_no_tokens() -> None:
    x, weights, _, *experts = mlp_case(1, 2, torch.float32)
    none = torch.empty(0, 2, dtype=torch.int64)
    arguments = (x[:0], weights[:0], none, *experts)
    assert expert_mlp(*(each.to(DEVICE) for each in arguments)).shape == (0, 48)
