"""Routing and the MLPs of experts against formulas written out token by token in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pdx.kernels.cpu.expert_mlp import expert_mlp as cpu_expert_mlp
from pdx.kernels.reference.expert_mlp import expert_mlp
from pdx.kernels.reference.routing import grouped_routing, softmax_routing

#: A few roundings of the dtype on values of size 1.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}
MlpOp = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
mlps = pytest.mark.parametrize("mlp", [expert_mlp, cpu_expert_mlp], ids=["reference", "cpu"])
NUM_EXPERTS, INNER, HIDDEN = 6, 10, 16


def case(num_tokens: int, dtype: torch.dtype, num_chosen: int = 2) -> tuple[Tensor, ...]:
    """x, weights, ids, gate_up, down."""
    torch.manual_seed(num_tokens)
    ids = torch.stack([torch.randperm(NUM_EXPERTS - 1)[:num_chosen] for _ in range(num_tokens)])
    return (
        torch.randn(num_tokens, HIDDEN, dtype=dtype),
        torch.rand(num_tokens, num_chosen),
        ids,
        torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN, dtype=dtype) / 4,
        torch.randn(NUM_EXPERTS, HIDDEN, INNER, dtype=dtype) / 4,
    )


@mlps
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 65])
def test_expert_mlp(mlp: MlpOp, dtype: torch.dtype, num_tokens: int) -> None:
    x, weights, ids, gate_up, down = case(num_tokens, dtype)
    # An expert that nobody chose is not read.
    gate_up[NUM_EXPERTS - 1] = float("nan")
    actual = mlp(x, weights, ids, gate_up, down)
    assert (actual.dtype, actual.shape) == (dtype, x.shape)
    for token in range(num_tokens):
        expected = torch.zeros(HIDDEN, dtype=torch.float64)
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            inner = gate / (1 + torch.exp(-gate)) * up
            expected += weight * (down[expert].double() @ inner)
        error = (actual[token].double() - expected).abs().max()
        assert float(error) < TOLERANCE[dtype]


@mlps
def test_expert_mlp_of_no_tokens(mlp: MlpOp) -> None:
    _, _, _, gate_up, down = case(1, torch.float32)
    x, ids = torch.empty(0, HIDDEN), torch.empty(0, 2, dtype=torch.int64)
    assert mlp(x, torch.empty(0, 2), ids, gate_up, down).shape == (0, HIDDEN)


@mlps
def test_all_tokens_at_one_expert(mlp: MlpOp) -> None:
    x, weights, ids, gate_up, down = case(9, torch.float32, num_chosen=1)
    ids[:] = 3
    expected = expert_mlp(x, weights, ids, gate_up, down)
    torch.testing.assert_close(mlp(x, weights, ids, gate_up, down), expected)


def test_softmax_routing_takes_probabilities_among_all() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    weights, ids = softmax_routing(logits, 2, renormalise=False)
    assert ids.tolist() == [[1, 2]]
    total = sum(torch.exp(logits[0]))
    torch.testing.assert_close(weights, torch.exp(logits[:, [1, 2]]) / total)


def test_softmax_routing_renormalised_sums_to_one() -> None:
    weights, _ = softmax_routing(torch.randn(5, 8), 3, renormalise=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(5))


def test_routing_is_in_float32() -> None:
    # In bfloat16 the two probabilities would be equal, and the weights with them.
    logits = torch.tensor([[0.0, 2.0, 2.015625]], dtype=torch.bfloat16)
    weights, ids = softmax_routing(logits, 2, renormalise=True)
    assert weights.dtype == torch.float32
    assert ids.tolist() == [[2, 1]]
    assert float(weights[0, 0] - weights[0, 1]) > 0.007


def test_grouped_routing_takes_the_best_of_the_groups_with_the_best_pairs() -> None:
    # Sigmoids 0.5 and more; the first group has the best expert, the second the best pair.
    logits = torch.tensor([[3.0, 0.0, 2.0, 1.5, -5.0, -5.0]])
    weights, ids = grouped_routing(logits, torch.zeros(6), 2, 3, 1, False, 1.0)
    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, torch.sigmoid(logits[:, [2, 3]]))


def test_bias_of_grouped_routing_only_chooses() -> None:
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 0.2, 0.0, 0.1])
    weights, ids = grouped_routing(logits, bias, 2, 1, 1, True, 2.5)
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, torch.full((1, 2), 1.25))


def test_grouped_routing_stays_in_its_groups_where_all_in_them_are_below_zero() -> None:
    logits, bias = torch.tensor([[5.0, 5.0, -5.0, -5.0]]), torch.tensor([-1.5, -1.6, -3.0, -3.0])
    _, ids = grouped_routing(logits, bias, 2, 2, 1, True, 1.0)
    assert sorted(ids[0].tolist()) == [0, 1]


def test_grouped_routing_of_no_tokens() -> None:
    weights, ids = grouped_routing(torch.empty(0, 8), torch.zeros(8), 2, 4, 2, True, 1.0)
    assert weights.shape == ids.shape == (0, 2)
