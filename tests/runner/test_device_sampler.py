"""Drawing on a device: the same tokens as the host's sampler, for every mixture of requests."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from pdx.errors import InternalError
from pdx.kernels.ops import REFERENCE_OPS
from pdx.request.batch import SampledToken
from pdx.request.request import SamplingParams
from pdx.runner.device_sampler import draw_arrays, draw_tokens, to_tokens
from pdx.runner.logit_rules import LogitRules
from pdx.runner.requests import Draw
from pdx.runner.sampler import sample

VOCAB = 97


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


def on_device(logits: torch.Tensor, draws: list[Draw]) -> list[SampledToken]:
    arrays = draw_arrays(draws, VOCAB)
    num_tops = max(d.sampling.logprobs or 0 for d in draws)
    drawn = draw_tokens(logits, arrays, min(num_tops, VOCAB), REFERENCE_OPS)
    return to_tokens(drawn.token_ids.tolist(), drawn.told.tolist(), draws)


def check(logits: torch.Tensor, draws: list[Draw]) -> None:
    for ours, theirs in zip(on_device(logits, draws), sample(logits, draws), strict=True):
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


@pytest.mark.parametrize("seed", range(25))
def test_tokens_are_the_hosts(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    draws = [draw(idx, **any_params(rng)) for idx in range(rng.randint(1, 12))]
    logits = torch.randn(len(draws), VOCAB) * rng.choice([0.3, 2.0, 8.0])
    if rng.random() < 0.5:
        logits = logits.round()  # equal logits, as bfloat16 has many
    logits[:, 90:93] = float("-inf")
    check(logits, draws)


def test_lowest_of_equal_highest_is_greedy() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [8, 40]] = 3.0
    draws = [draw(idx, temperature=0.0) for idx in range(2)]
    assert [token.token_id for token in on_device(logits, draws)] == [0, 8]


def test_rows_that_are_not_finite_are_named() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, 4] = float("nan")
    with pytest.raises(InternalError, match=r"requests \[1\] are not finite"):
        on_device(logits, [draw(idx, temperature=1.0) for idx in range(2)])
