"""Bias, penalties and min_tokens: what they do to logits, in which order, and to greedy text."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from pdx.kernels.reference.logit_rules import apply_rules
from pdx.request.request import SamplingParams
from pdx.runner.logit_rules import RULE_COLUMNS, LogitRules, rule_arrays
from pdx.runner.requests import Draw
from tests.runner.drawn import drawn

VOCAB = 40
PROMPT = [3, 5, 5, 8, 21]
OUTPUT = [8, 9, 9, 9, 30, 5]
ROW = torch.linspace(-3, 3, VOCAB)[
    torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
]


def apply(rules: LogitRules, output: list[int]) -> Tensor:
    """The changed row."""
    arrays = rule_arrays([(rules, output)])
    [row] = apply_rules(ROW[None].clone(), *(arrays[name] for name in RULE_COLUMNS))
    return row


def applied(output: list[int] = OUTPUT, **changes: object) -> Tensor:
    sampling = SamplingParams(max_tokens=99, **changes)  # type: ignore[arg-type]
    rules = LogitRules.of(sampling, PROMPT, VOCAB)
    assert rules is not None
    return apply(rules, output)


def reference(
    *,
    bias: dict[int, float],
    repetition: float,
    presence: float,
    frequency: float,
    held_back: set[int],
) -> np.ndarray:
    """The definition, one token at a time."""
    row = ROW.numpy().astype(np.float64)
    for token in range(VOCAB):
        logit = row[token] + bias.get(token, 0.0)
        if token in PROMPT or token in OUTPUT:
            logit = logit / repetition if logit > 0 else logit * repetition
        if token in OUTPUT:
            logit -= presence + frequency * OUTPUT.count(token)
        row[token] = -math.inf if token in held_back else logit
    return row


def test_requests_without_rules_have_none() -> None:
    sampling = SamplingParams(max_tokens=9, temperature=0.3, top_k=4, stop_token_ids=(1,))
    assert LogitRules.of(sampling, PROMPT, VOCAB) is None
    assert LogitRules.of(SamplingParams(max_tokens=9, min_tokens=5), PROMPT, VOCAB) is None


@pytest.mark.parametrize("repetition", [1.0, 1.3, 0.7])
@pytest.mark.parametrize("presence", [0.0, 0.8, -0.8])
@pytest.mark.parametrize("frequency", [0.0, 0.45, -0.45])
@pytest.mark.parametrize("bias", [{}, {5: 4.0, 9: -100.0, 0: 0.25}], ids=["", "bias"])
@pytest.mark.parametrize("min_tokens", [0, len(OUTPUT), len(OUTPUT) + 1])
def test_rules_apply_in_their_order(
    repetition: float, presence: float, frequency: float, bias: dict[int, float], min_tokens: int
) -> None:
    sampling = SamplingParams(
        max_tokens=99,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
        min_tokens=min_tokens,
        stop_token_ids=(0, 17),
    )
    rules = LogitRules.of(sampling, PROMPT, VOCAB)
    row = ROW if rules is None else apply(rules, OUTPUT)
    expected = reference(
        bias=bias,
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        held_back={0, 17} if min_tokens > len(OUTPUT) else set(),
    )
    # float32 arithmetic on numbers below 103.
    np.testing.assert_allclose(row.numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("penalty", [1.2, 0.8])
def test_repetition_penalty_is_transformers(penalty: float) -> None:
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([PROMPT + OUTPUT]), ROW[None])[0]
    torch.testing.assert_close(applied(repetition_penalty=penalty), expected, rtol=0, atol=1e-6)


def test_presence_and_frequency_look_at_the_output_only() -> None:
    assert torch.equal(applied([], presence_penalty=2.0, frequency_penalty=2.0), ROW)
    changed = applied(presence_penalty=2.0) != ROW
    assert sorted(changed.nonzero().flatten().tolist()) == sorted(set(OUTPUT))


def test_repetition_penalty_looks_at_the_prompt_before_there_is_output() -> None:
    changed = applied([], repetition_penalty=2.0) != ROW
    assert sorted(changed.nonzero().flatten().tolist()) == sorted(set(PROMPT))


def test_ids_past_the_vocabulary_change_nothing() -> None:
    row = applied(
        logit_bias={VOCAB: 50.0, -1: 50.0, 2: 1.0}, min_tokens=99, stop_token_ids=(VOCAB, 10**6)
    )
    assert (row != ROW).nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 5e-324])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_repetition_penalty_close_to_zero_draws_a_token(penalty: float, temperature: float) -> None:
    assert applied(repetition_penalty=penalty).isfinite().all()
    sampling = SamplingParams(max_tokens=9, temperature=temperature, repetition_penalty=penalty)
    [token] = greedy(sampling, 1)
    assert ROW[token] > 0
    assert token in PROMPT


def greedy(sampling: SamplingParams, num_tokens: int) -> list[int]:
    """Greedy text of a model that always gives the same logits."""
    rules, output = LogitRules.of(sampling, PROMPT, VOCAB), list[int]()
    for idx in range(num_tokens):
        draw = Draw(
            request_id=1,
            row=0,
            sampling=sampling,
            output_idx=idx,
            rules=rules,
            output_ids=tuple(output),
        )
        [token] = drawn(ROW[None], [draw])
        output.append(token.token_id)
    return output


def test_greedy_text_obeys_every_rule() -> None:
    ranked = ROW.argsort(descending=True).tolist()

    def text(num_tokens: int = 3, **changes: object) -> list[int]:
        sampling = SamplingParams(max_tokens=99, temperature=0.0, **changes)  # type: ignore[arg-type]
        return greedy(sampling, num_tokens)

    assert text() == [ranked[0]] * 3
    assert text(presence_penalty=2.0) == ranked[:3]
    # Steps of the logits are 6 / 39: after two times 0.1 the first is behind the second.
    assert text(frequency_penalty=0.1) == [ranked[0], ranked[0], ranked[1]]
    assert text(repetition_penalty=2.0)[0] not in PROMPT
    assert len(set(text(repetition_penalty=2.0))) == 3
    assert text(logit_bias={ranked[30]: 50.0}) == [ranked[30]] * 3
    held = text(4, min_tokens=2, stop_token_ids=(ranked[0], ranked[1]))
    assert held == [ranked[2], ranked[2], ranked[0], ranked[0]]


def test_log_probabilities_are_of_the_logits_before_the_rules() -> None:
    sampling = SamplingParams(max_tokens=9, temperature=0.0, logit_bias={7: 90.0}, logprobs=2)
    rules = LogitRules.of(sampling, PROMPT, VOCAB)
    draw = Draw(request_id=1, row=0, sampling=sampling, output_idx=0, rules=rules)
    [token] = drawn(ROW[None], [draw])
    expected = torch.log_softmax(ROW, dim=0)
    assert token.token_id == 7
    assert token.logprob == pytest.approx(float(expected[7]), abs=1e-6)
    values, ids = expected.topk(2)
    assert [i for i, _ in token.top] == ids.tolist()
    assert [p for _, p in token.top] == pytest.approx(values.tolist(), abs=1e-6)
