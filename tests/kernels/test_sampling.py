"""Sampling: greedy ties, temperature and filters as distributions, repeatability, logprobs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pdx.errors import InternalError
from pdx.kernels.cpu import sampling as module
from pdx.kernels.cpu.sampling import sample_row as sample_row_by
from pdx.request.request import SamplingParams
from pdx.runner.logit_rules import LogitRules
from pdx.runner.requests import Draw
from tests.runner.drawn import drawn

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 3.0])


def params(temperature: float = 1.0, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=temperature, **changes)


def sample_row(row: torch.Tensor, sampling: SamplingParams, output_idx: int) -> int:
    filters = sampling.top_k, sampling.top_p, sampling.min_p
    return sample_row_by(row, sampling.temperature, *filters, sampling.seed, output_idx)


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


GRID = 401


@pytest.fixture
def even_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws 0 to GRID - 1 take evenly spaced numbers: shares are probabilities to 1 / GRID."""
    monkeypatch.setattr(module, "token_uniform", lambda seed, idx: (idx + 0.5) / GRID)


@pytest.mark.usefixtures("even_grid")
@pytest.mark.parametrize("temperature", [0.4, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, 64, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_filters_are_transformers_in_its_order(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = 3 * torch.randn(64, generator=torch.Generator().manual_seed(5))
    scores = TemperatureLogitsWarper(temperature)(None, row[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    scores = TopPLogitsWarper(top_p)(None, scores)
    scores = MinPLogitsWarper(min_p)(None, scores)
    expected = torch.softmax(scores[0], dim=0)
    shares = draw(row, params(temperature, top_k=top_k, top_p=top_p, min_p=min_p), GRID)
    assert float((shares - expected).abs().max()) <= 1.01 / GRID
    assert not (shares[expected == 0] > 0).any()


@pytest.mark.usefixtures("even_grid")
@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_top_k_keeps_so_many_and_of_equals_the_lower_ids(top_k: int) -> None:
    shares = draw(LOGITS, params(top_k=top_k), GRID)
    assert shares.nonzero().flatten().tolist() == sorted([1, 4, 2, 0][:top_k])
    flat = draw(torch.zeros(5000), params(top_k=top_k), GRID)
    assert flat.nonzero().flatten().tolist() == list(range(top_k))


def test_shares_of_filtered_draws_pass_a_chi_square_test() -> None:
    row = torch.randn(200, generator=torch.Generator().manual_seed(2))
    sampling = params(0.8, top_k=40, top_p=0.9, min_p=0.05, seed=20)
    num = 4000
    counts = draw(row, sampling, num) * num
    probs = torch.softmax(row.double() / 0.8, dim=0)
    best = probs.topk(40)
    inside = best.values.cumsum(0) - best.values < 0.9 * best.values.sum()
    inside &= best.values >= 0.05 * best.values[0]
    kept = best.indices[inside]
    expected = probs[kept] / probs[kept].sum() * num
    assert float(counts.sum() - counts[kept].sum()) == 0
    assert float(expected.min()) > 5
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    # Mean n - 1, variance 2 (n - 1) for n kept tokens: five standard deviations.
    degrees = len(kept) - 1
    assert abs(statistic - degrees) < 5 * math.sqrt(2 * degrees)


def test_token_does_not_depend_on_the_company() -> None:
    rows = torch.randn(8, 500, generator=torch.Generator().manual_seed(4))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "presence_penalty": 1.0, "logprobs": 5},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.5, "logprobs": 0},
        {"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.2},
        {"temperature": 1.3, "logit_bias": {3: 4.0}, "logprobs": 1},
        {"temperature": 1.0, "frequency_penalty": -0.5},
        {"temperature": 1.0},
    ]
    draws = []
    for idx, kind in enumerate(kinds):
        sampling = params(seed=idx, **kind)
        rules = LogitRules.of(sampling, [1, 2, 3], 500)
        draws.append(
            Draw(
                request_id=idx,
                row=idx,
                sampling=sampling,
                output_idx=4,
                rules=rules,
                output_ids=(1, 9, 9, 4),
            )
        )
    together = drawn(rows, draws)
    reversed_ = drawn(rows.flip(0), draws[::-1])[::-1]
    alone = [drawn(rows[i : i + 1], [d])[0] for i, d in enumerate(draws)]
    for others in (reversed_, alone):
        assert [t.token_id for t in others] == [t.token_id for t in together]
        assert [[i for i, _ in t.top] for t in others] == [[i for i, _ in t.top] for t in together]
    assert [len(t.top) for t in together] == [0, 5, 0, 0, 0, 1, 0, 0]


def test_alternatives_are_the_most_likely_by_the_raw_logits() -> None:
    sampling = params(temperature=0.1, top_p=0.1, logprobs=4)
    [token] = drawn(LOGITS[None], [Draw(request_id=1, row=0, sampling=sampling, output_idx=0)])
    expected = torch.log_softmax(LOGITS, dim=0)
    assert [i for i, _ in token.top] == [1, 4, 2, 0]  # of equals the lower id first
    assert [p for _, p in token.top] == pytest.approx([float(expected[i]) for i in (1, 4, 2, 0)])


def test_more_alternatives_than_tokens_are_all_of_them() -> None:
    sampling = params(temperature=0, logprobs=20)
    [token] = drawn(LOGITS[None], [Draw(request_id=1, row=0, sampling=sampling, output_idx=0)])
    assert [i for i, _ in token.top] == [1, 4, 2, 0, 3]


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
    tokens = drawn(torch.stack([LOGITS, LOGITS]), draws)
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
        drawn(torch.stack([LOGITS, broken]), draws)
