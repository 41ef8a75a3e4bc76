"""A real rank whose model has rows for more ids than the tokenizer knows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pdx.request.batch import RequestStart
from pdx.request.ids import IdArray
from pdx.request.request import SamplingParams
from tests.oracle.transformers_oracle import Oracle
from tests.runner.rank_process import PageFeed, RankProcess, rank_config

NUM_TOKENS = 400


@pytest.fixture(scope="module")
def rank(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcess]:
    """The tiny Llama, whose vocabulary is 512, with the tokenizer's first 400 tokens."""
    folder = shutil.copytree(tiny_llama, tmp_path_factory.mktemp("padded") / "model")
    path = folder / "tokenizer.json"
    file = json.loads(path.read_text())
    vocab = file["model"]["vocab"]
    file["model"]["vocab"] = {token: i for token, i in vocab.items() if i < NUM_TOKENS}
    file["added_tokens"] = [t for t in file["added_tokens"] if t["id"] < NUM_TOKENS]
    path.write_text(json.dumps(file))
    with RankProcess(rank_config(folder)) as process:
        process.wait_ready()
        yield process


def rows_of(oracle: Oracle, token_ids: list[int]) -> torch.Tensor:
    """The oracle's logits [T, V], without what has no token."""
    logits = oracle.logits(token_ids).clone()
    logits[:, NUM_TOKENS:] = float("-inf")
    return logits


def test_greedy_takes_the_best_id_that_has_a_token(
    rank: RankProcess, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = tiny_prompt_ids[:33]
    text = [t.token_id for t in rank.generate(1, prompt, 24, list(range(8)))]
    raw = tiny_oracle.logits([*prompt, *text])[len(prompt) - 1 : -1]
    assert (raw.argmax(dim=-1) >= NUM_TOKENS).any()  # it would have drawn some
    best = rows_of(tiny_oracle, [*prompt, *text])[len(prompt) - 1 : -1].max(dim=-1).values
    chosen = raw.gather(1, torch.tensor(text)[:, None])[:, 0]
    assert max(text) < NUM_TOKENS
    assert (best - chosen).tolist() == pytest.approx([0.0] * len(text), abs=1e-3)


def test_draws_and_alternatives_have_tokens_and_share_all_probability(
    rank: RankProcess, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = tiny_prompt_ids[:20]
    sampling = SamplingParams(
        max_tokens=99, temperature=2.0, repetition_penalty=1.3, seed=4, logprobs=20
    )
    tokens = rank.generate(1, prompt, 32, list(range(8)), sampling)
    ids = [*prompt, *(t.token_id for t in tokens)]
    logprobs = torch.log_softmax(rows_of(tiny_oracle, ids), dim=-1)[len(prompt) - 1 :]
    for row, token in zip(logprobs, tokens, strict=False):
        assert max(token.token_id, *(i for i, _ in token.top)) < NUM_TOKENS
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
        assert [p for _, p in token.top] == pytest.approx(row.topk(20).values.tolist(), abs=1e-4)


def test_a_prompt_may_hold_any_row_and_is_scored_by_the_same_probabilities(
    rank: RankProcess, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = [*tiny_prompt_ids[:10], NUM_TOKENS + 7, *tiny_prompt_ids[10:20]]
    start = RequestStart(
        request_id=1,
        token_ids=IdArray(prompt),
        num_computed=0,
        first_output_idx=0,
        sampling=None,
        prompt_logprobs=5,
    )
    step = PageFeed([0, 1]).step(1, 0, len(prompt), sample=False)
    [scores] = rank.run_pass([step], [start]).prompt_scores
    rank.run([], removes=[1])
    logprobs = torch.log_softmax(rows_of(tiny_oracle, prompt), dim=-1)
    for row, token in zip(logprobs, scores.tokens, strict=False):
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
        assert max(i for i, _ in token.top) < NUM_TOKENS
