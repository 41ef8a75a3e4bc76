"""Drawing: the same tokens by every device's ops, for every mixture of requests."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from pdx.errors import InternalError
from pdx.kernels.ops import REFERENCE_OPS, Ops
from pdx.request.request import SamplingParams
from pdx.runner.logit_rules import LogitRules
from pdx.runner.requests import Draw
from tests.runner.drawn import drawn

VOCAB = 97
#: Tokens of the cases below. A seed gives the same text in every version.
PINNED = [
    [59, 25, 3, 3, 7, 3, 19],
    [50, 23, 66],
    [27],
    [30, 62, 26, 54],
    [49, 1, 4, 79],
    [16, 3, 2, 35, 87, 59, 2, 37, 1, 84],
    [1, 95, 10, 1, 14, 20, 50, 50, 86, 22],
    [35, 1, 67, 57, 9, 3],
    [75, 28, 15, 44],
    [13, 20, 45, 16, 46, 50, 47, 30],
    [50, 15, 24, 35, 33, 3, 5, 78, 16, 87],
    [1, 2, 20, 11, 94, 72, 33, 67],
    [49, 62, 63, 60, 9, 50, 50, 74],
    [77, 64, 6, 44, 3],
    [2, 2],
    [3, 43, 9, 7],
    [30, 18, 32, 3, 49, 35],
    [59, 1, 60, 32, 2, 76, 61, 1, 2],
    [2, 68, 14],
    [10, 39, 82, 71, 1, 42, 12, 15, 86, 88, 21],
    [30, 11, 3, 56, 3, 3, 22, 3, 31, 33, 52, 3],
    [3, 8, 1],
    [3, 50, 3],
    [15, 2, 3, 49, 3],
    [36, 2, 3, 74, 47, 87, 56, 1, 45, 57, 50, 47],
]


def draw(idx: int, **params: Any) -> Draw:
    sampling = SamplingParams(max_tokens=99, **params)
    prompt, output = [1, 2, 2, 50], (2, 7, 7, 9)[: idx % 5]
    rules = LogitRules.of(sampling, prompt, VOCAB)
    return Draw(
        request_id=idx,
        row=idx,
        sampling=sampling,
        output_idx=len(output),
        rules=rules,
        output_ids=output if rules else (),
    )


def check(logits: torch.Tensor, draws: list[Draw]) -> None:
    both = (drawn(logits, draws, ops) for ops in (REFERENCE_OPS, None))
    for ours, theirs in zip(*both, strict=True):
        assert (ours.request_id, ours.token_id) == (theirs.request_id, theirs.token_id)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-6)
        assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
        logprobs = [p for _, p in theirs.top]
        assert [p for _, p in ours.top] == pytest.approx(logprobs, abs=1e-6)


def any_params(rng: random.Random) -> dict[str, Any]:
    choices: dict[str, list[Any]] = {
        "temperature": [0.0, 0.3, 1.0, 1.7],
        "top_k": [0, 1, 5, VOCAB, 1000],
        "top_p": [1.0, 1.0, 0.9, 0.3, 1e-9],
        "min_p": [0.0, 0.0, 0.2, 1.0],
        "presence_penalty": [0.0, 0.0, 1.5],
        "frequency_penalty": [0.0, 0.0, -0.7],
        "repetition_penalty": [1.0, 1.0, 1.3, 1e-30],
        "logit_bias": [{}, {}, {3: 4.0, 96: -2.0, 5000: 9.0}],
        "logprobs": [None, 0, 4, 200],
        "seed": [0, 1, 2**64 - 1],
    }
    params = {name: rng.choice(values) for name, values in choices.items()}
    if rng.random() < 0.3:
        params |= {"min_tokens": 3, "stop_token_ids": (0, 7)}
    return params


def case(seed: int) -> tuple[torch.Tensor, list[Draw]]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    draws = [draw(idx, **any_params(rng)) for idx in range(rng.randint(1, 12))]
    logits = torch.randn(len(draws), VOCAB) * rng.choice([0.3, 2.0, 8.0])
    if rng.random() < 0.5:
        logits = logits.round()  # equal logits, as bfloat16 has many
    logits[:, 90:93] = float("-inf")
    return logits, draws


@pytest.mark.parametrize("seed", range(len(PINNED)))
def test_tokens_are_the_references_and_stay(seed: int) -> None:
    logits, draws = case(seed)
    check(logits, draws)
    assert [token.token_id for token in drawn(logits, draws)] == PINNED[seed]


def test_lowest_of_equal_highest_is_greedy() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [8, 40]] = 3.0
    draws = [draw(idx, temperature=0.0) for idx in range(2)]
    assert [token.token_id for token in drawn(logits, draws, REFERENCE_OPS)] == [0, 8]


@pytest.mark.parametrize("ops", [REFERENCE_OPS, None], ids=["reference", "cpu"])
def test_rows_that_are_not_finite_are_named(ops: Ops | None) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, 4] = float("nan")
    with pytest.raises(InternalError, match=r"requests \[1\] are not finite"):
        drawn(logits, [draw(idx, temperature=1.0) for idx in range(2)], ops)
