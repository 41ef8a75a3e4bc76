"""Sampling: greedy ties, temperature and top-p as distributions, repeatability, logprobs."""

from __future__ import annotations

import math

import pytest
import torch

from pdx.errors import InternalError
from pdx.request.request import SamplingParams
from pdx.runner.requests import Draw
from pdx.runner.sampler import sample, sample_row

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 3.0])


def params(temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=temperature, top_p=top_p, seed=seed)


def draw(row: torch.Tensor, sampling: SamplingParams, num: int = 4000) -> torch.Tensor:
    """How often each id is drawn, as shares."""
    ids = torch.tensor([sample_row(row, sampling, i) for i in range(num)])
    return torch.bincount(ids, minlength=len(row)) / num


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    assert sample_row(LOGITS, params(temperature=0), 0) == 1
    assert sample_row(torch.zeros(100_000), params(temperature=0), 5) == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_shares_follow_the_softmax_at_that_temperature(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, dim=0)
    # Three standard deviations of a share of 1/2 over 4,000 draws are 0.024.
    assert float((draw(LOGITS, params(temperature)) - expected).abs().max()) < 0.024


def test_tiny_temperature_is_greedy_among_equals() -> None:
    shares = draw(LOGITS, params(temperature=1e-6), 200)
    assert shares[1] > 0.3
    assert shares[4] > 0.3
    assert float(shares[1] + shares[4]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-9, {1}),  # the lower id of the two heaviest
        (0.5, {1, 4}),
        (0.85, {1, 2, 4}),
        (0.95, {0, 1, 2, 4}),
        (0.9999999, {0, 1, 2, 3, 4}),
        (1.0, {0, 1, 2, 3, 4}),
    ],
)
def test_top_p_keeps_the_smallest_set_that_holds_it(top_p: float, kept: set[int]) -> None:
    shares = draw(LOGITS, params(top_p=top_p))
    assert {i for i in range(5) if shares[i] > 0} == kept
    weights = torch.softmax(LOGITS, dim=0)
    expected = torch.tensor([float(weights[i]) if i in kept else 0.0 for i in range(5)])
    assert float((shares - expected / expected.sum()).abs().max()) < 0.024


def test_top_p_over_a_large_flat_vocabulary_keeps_its_share() -> None:
    shares = draw(torch.zeros(1000), params(top_p=0.5), 3000)
    assert float(shares[500:].sum()) == 0.0


def test_token_depends_on_seed_and_index_only() -> None:
    row = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    first = [sample_row(row, params(seed=2**64 - 1), i) for i in range(20)]
    assert first == [sample_row(row, params(seed=2**64 - 1), i) for i in range(20)]
    assert first != [sample_row(row, params(seed=7), i) for i in range(20)]
    assert len(set(first)) > 10


def test_never_draws_an_id_of_probability_zero() -> None:
    row = torch.full((50,), -math.inf)
    row[13] = 0.0
    assert {sample_row(row, params(), i) for i in range(200)} == {13}


def test_log_probability_is_of_the_raw_logits() -> None:
    draws = [
        Draw(request_id=5, row=0, sampling=params(temperature=0), output_idx=0),
        Draw(request_id=6, row=1, sampling=params(temperature=0.1, top_p=0.1), output_idx=3),
    ]
    tokens = sample(torch.stack([LOGITS, LOGITS]), draws)
    expected = float(torch.log_softmax(LOGITS, dim=0)[1])
    assert [(t.request_id, t.token_id) for t in tokens] == [(5, 1), (6, 1)]
    assert [t.logprob for t in tokens] == pytest.approx([expected, expected], abs=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_logits_never_become_a_token(value: float) -> None:
    broken = LOGITS.clone()
    broken[2] = value
    draws = [
        Draw(request_id=i, row=i, sampling=params(temperature=0), output_idx=0) for i in (3, 4)
    ]
    with pytest.raises(InternalError, match=r"\[4\]"):
        sample(torch.stack([LOGITS, broken]), draws)
