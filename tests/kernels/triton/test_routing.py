"""Routing: the reference's experts and weights; ties, biases below zero, NaN, no tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdx.kernels.reference.routing import grouped_routing as grouped_reference
from pdx.kernels.reference.routing import softmax_routing as softmax_reference
from pdx.kernels.routing import grouped_routing, softmax_routing
from tests.kernels.triton.cases import DEVICE

NAN = float("nan")


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    weights, ids = (x.cpu() for x in found)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(weights.double(), expected[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen"),
    [
        (0, 8, 2),
        (1, 8, 8),
        (5, 6, 2),
        (7, 128, 8),
        pytest.param(300, 160, 8, marks=pytest.mark.slow),
    ],
)
def test_softmax_routing(
    num_tokens: int, num_experts: int, num_chosen: int, dtype: torch.dtype, renormalise: bool
) -> None:
    # Distinct, also in bfloat16 where it has room: what ties do is the next test's.
    logits = torch.rand(num_tokens, num_experts).argsort(-1).to(dtype) / 8
    found = softmax_routing(logits.to(DEVICE), num_chosen, renormalise)
    check(found, softmax_reference(logits.double(), num_chosen, renormalise))


def test_of_equal_logits_the_lower_expert_comes_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0] * 5], device=DEVICE)
    weights, ids = softmax_routing(logits, 2, renormalise=True)
    assert ids.tolist() == [[1, 2], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "groups", "num_chosen"),
    [
        (0, 8, (4, 2), 2),
        (5, 6, (3, 1), 2),
        (4, 9, (3, 2), 4),
        (9, 16, (4, 2), 8),
        (3, 256, (8, 4), 8),
        (4, 8, (1, 1), 3),
    ],
)
def test_grouped_routing(
    num_tokens: int, num_experts: int, groups: tuple[int, int], num_chosen: int, renormalise: bool
) -> None:
    logits, bias = torch.randn(num_tokens, num_experts), torch.randn(num_experts) / 4
    rest = (num_chosen, *groups, renormalise, 2.5)
    found = grouped_routing(logits.to(DEVICE), bias.to(DEVICE), *rest)
    check(found, grouped_reference(logits.double(), bias.double(), *rest))


def test_grouped_routing_stays_in_its_groups_where_all_in_them_are_below_zero() -> None:
    logits = torch.tensor([[5.0, 5.0, -5.0, -5.0]], device=DEVICE)
    bias = torch.tensor([-1.5, -1.6, -3.0, -3.0], device=DEVICE)
    _, ids = grouped_routing(logits, bias, 2, 2, 1, True, 1.0)
    assert ids.tolist() == [[0, 1]]


def test_equal_groups_and_experts_are_taken_in_order() -> None:
    """A pair of equals is a group's two best, not one of them twice."""
    zeros, bias = torch.zeros(1, 8, device=DEVICE), torch.zeros(8, device=DEVICE)
    assert grouped_routing(zeros, bias, 4, 4, 2, True, 1.0)[1].tolist() == [[0, 1, 2, 3]]
    bias[6:] = 0.1
    assert grouped_routing(zeros, bias, 3, 4, 2, True, 1.0)[1].tolist() == [[6, 7, 0]]


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's maximum tells; a GPU's does not
def test_nan_gives_experts_that_exist_and_weights_that_tell() -> None:
    logits = torch.tensor([[NAN] * 6, [0.0, 1.0, NAN, 3.0, 4.0, 5.0]], device=DEVICE)
    bias = torch.zeros(6, device=DEVICE)
    for weights, ids in (
        softmax_routing(logits, 2, renormalise=True),
        grouped_routing(logits[:1], bias, 2, 3, 1, True, 1.0),
    ):
        assert bool(weights.isnan().all())
        assert bool(((ids >= 0) & (ids < 6)).all())
