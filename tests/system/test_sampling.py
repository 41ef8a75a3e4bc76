"""Sampling and scores through a pair: what the colocated engine draws, what the oracle says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.oracle.transformers_oracle import Oracle
from tests.system.conftest import Generate, Pair
from tests.system.prompts import prompt_of

pytestmark = pytest.mark.parametrize("pair", ["tcp"], indirect=True)

#: Each is the body of a request and the engine's parameters at once.
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 1.5, "top_k": 12},
    "top_p": {"temperature": 1.5, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.02},
    "all filters": {"temperature": 2.0, "top_k": 100, "top_p": 0.95, "min_p": 0.01},
    "output penalties": {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.4},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 1.0},
    "bias": {"temperature": 1.0, "logit_bias": {40: 4.0, 41: 3.0, 42: -100.0}},
}
#: What generation_config.json would fill in otherwise.
NEUTRAL: dict[str, Any] = {"top_p": 1.0}


def sampled(pair: Pair, prompt: list[int], num_tokens: int, **fields: Any) -> list[int]:
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(i): bias for i, bias in fields["logit_bias"].items()}
    return pair.decoder.complete(prompt, num_tokens, **(NEUTRAL | fields))


@pytest.mark.parametrize("kind", KINDS)
def test_one_seed_gives_one_text_on_a_pair_and_on_one_node(
    pair: Pair, colocated: Generate, tiny_prompt_ids: list[int], kind: str
) -> None:
    prompt, fields = prompt_of(tiny_prompt_ids, 70), KINDS[kind] | {"seed": 2**63 + 5}
    text = sampled(pair, prompt, 32, **fields)
    assert text == sampled(pair, prompt, 32, **fields)
    assert text == colocated(prompt, 32, **(NEUTRAL | fields))
    pair.decoder.wait_clean()


def test_another_seed_gives_another_text(pair: Pair, tiny_prompt_ids: list[int]) -> None:
    prompt = prompt_of(tiny_prompt_ids, 40)
    texts = [tuple(sampled(pair, prompt, 16, temperature=1.0, seed=s)) for s in range(4)]
    assert len(set(texts)) == 4


def test_company_does_not_change_a_drawn_text(pair: Pair, tiny_prompt_ids: list[int]) -> None:
    """A batch's shape changes the last bits of logits; these seeds stay clear of any edge."""
    prompts = [prompt_of(tiny_prompt_ids, 20 + 13 * i, shift=7 * i) for i in range(len(KINDS))]
    works = [
        (prompt, fields | {"seed": i})
        for i, (prompt, fields) in enumerate(zip(prompts, KINDS.values(), strict=True))
    ]
    alone = [sampled(pair, prompt, 24, **fields) for prompt, fields in works]
    with ThreadPoolExecutor(len(works)) as threads:
        together = list(threads.map(lambda work: sampled(pair, work[0], 24, **work[1]), works))
    assert together == alone
    pair.decoder.wait_clean()


def test_min_tokens_hold_back_what_would_have_stopped(
    pair: Pair, colocated: Generate, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 40)
    first = colocated(prompt, 1)
    assert sampled(pair, prompt, 9, stop_token_ids=first) == first
    text = sampled(pair, prompt, 9, stop_token_ids=first, min_tokens=4)
    assert len(text) >= 5 or text[-1] in first
    assert not set(text[:4]) & set(first)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 64, 65, 66, 129, 200])
def test_echoed_prompt_is_scored_by_the_prefiller_as_by_the_oracle(
    pair: Pair, tiny_oracle: Oracle, tiny_prompt_ids: list[int], length: int
) -> None:
    prompt = prompt_of(tiny_prompt_ids, length)
    answer = pair.decoder.post(prompt, 6, echo=True, logprobs=0).json()
    token_ids = [*prompt, *answer["choices"][0]["token_ids"]]
    scores = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert scores[0] is None  # nothing comes before it
    assert scores[1:] == pytest.approx(oracle_scores(tiny_oracle, token_ids), abs=1e-4)
    pair.decoder.wait_clean()


def oracle_scores(oracle: Oracle, token_ids: list[int]) -> list[float]:
    """Log-probability of each token but the first."""
    logprobs = torch.log_softmax(oracle.logits(token_ids), dim=-1)
    return [float(row[i]) for row, i in zip(logprobs, token_ids[1:], strict=False)]


@pytest.mark.parametrize("echo", [False, True])
def test_alternatives_are_the_oracles(
    pair: Pair, tiny_oracle: Oracle, tiny_prompt_ids: list[int], echo: bool
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 100)
    fields = NEUTRAL | {"temperature": 1.5, "seed": 3, "logprobs": 3, "echo": echo}
    choice = pair.decoder.post(prompt, 8, **fields).json()["choices"][0]
    logprobs = torch.log_softmax(tiny_oracle.logits([*prompt, *choice["token_ids"]]), dim=-1)
    rows = logprobs[:-1] if echo else logprobs[99:-1]
    tops = choice["logprobs"]["top_logprobs"][1 if echo else 0 :]
    for row, top in zip(rows, tops, strict=True):
        # By text, in which two ids may be equal; the drawn token is there as well.
        expected = row.topk(3).values.tolist()
        assert max(top.values()) == pytest.approx(expected[0], abs=1e-4)
        assert len(top) <= 4
        if len(top) >= 3:
            assert sorted(top.values())[-3:] == pytest.approx(expected[::-1], abs=1e-4)


def test_requests_that_score_run_beside_others(
    pair: Pair, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompts = [prompt_of(tiny_prompt_ids, 30 + 20 * i, shift=5 * i) for i in range(8)]

    def ask(idx: int) -> dict[str, Any]:
        scored = {"echo": True, "logprobs": 2} if idx % 2 else {}
        choice: dict[str, Any] = pair.decoder.post(prompts[idx], 12, **scored).json()["choices"][0]
        return choice

    with ThreadPoolExecutor(len(prompts)) as threads:
        choices = list(threads.map(ask, range(len(prompts))))
    for idx, choice in enumerate(choices):
        assert tiny_oracle.greedy(prompts[idx], 12).agrees_with(choice["token_ids"])
        if idx % 2:
            expected = oracle_scores(tiny_oracle, [*prompts[idx], *choice["token_ids"]])
            got = choice["logprobs"]["token_logprobs"][1:]
            assert got == pytest.approx(expected, abs=1e-4)
    pair.decoder.wait_clean()
