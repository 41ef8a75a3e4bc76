"""A rank with the layer that drafts: which drafts are right, and that no text knows of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pdx.request.batch import RequestStart, SampledToken
from pdx.request.ids import IdArray
from pdx.request.request import SamplingParams
from tests.oracle.transformers_oracle import Oracle
from tests.runner.rank_process import GREEDY, PageFeed, RankProcess, rank_config

NUM_TOKENS = 24
CHUNK = 24


@pytest.fixture(scope="module")
def rank(tiny_deepseek: Path) -> Iterator[RankProcess]:
    """Memory is poisoned: a draft that reads what nobody wrote is NaN, and right by chance only."""
    with RankProcess(rank_config(tiny_deepseek, drafts=True)) as process:
        process.wait_ready()
        yield process


def drafted(
    rank: RankProcess, request_id: int, prompt: list[int], sampling: SamplingParams
) -> list[list[SampledToken]]:
    """NUM_TOKENS or one more in all: what each pass gave behind the prompt."""
    start = RequestStart(
        request_id=request_id,
        token_ids=IdArray(prompt),
        num_computed=0,
        first_output_idx=0,
        sampling=sampling,
    )
    feed, starts, end = PageFeed(list(range(20))), [start], 0
    while end < len(prompt) - 1:
        begin, end = end, min(end + CHUNK, len(prompt) - 1)
        rank.run([feed.step(request_id, begin, end, sample=False)], starts)
        starts = []
    passes: list[list[SampledToken]] = []
    while (num_done := sum(map(len, passes))) < NUM_TOKENS:
        position = len(prompt) - 1 + num_done
        step = feed.step(request_id, position, position + 2, sample=True, may_draft=True)
        output = rank.run_pass([step], starts)
        # A prompt of one token has no pass before, which could have left a draft.
        assert output.num_drafts == (not starts)
        passes.append(output.tokens)
        starts = []
    rank.run([], removes=[request_id])
    return passes


@pytest.mark.parametrize("length", [1, 2, CHUNK, CHUNK + 1, CHUNK + 2, 130])
def test_the_text_is_that_of_transformers(
    length: int, rank: RankProcess, deepseek_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = tiny_prompt_ids[:length]
    passes = drafted(rank, length, prompt, GREEDY)
    tokens = [token.token_id for tokens in passes for token in tokens]
    assert deepseek_oracle.greedy(prompt, len(tokens)).agrees_with(tokens)


def test_the_drafts_are_those_of_transformers(
    rank: RankProcess, tiny_deepseek: Path, tiny_prompt_ids: list[int]
) -> None:
    """A pass gives a second token where transformers, asked there, drafts the one that comes."""
    oracle = Oracle(tiny_deepseek)
    prompt = tiny_prompt_ids[:70]
    passes = drafted(rank, 1000, prompt, GREEDY)
    expected, text = [], []
    for tokens in passes:
        text += [token.token_id for token in tokens]
        # The draft for the second of a pass's tokens was made from all before the first.
        known = [*prompt, *text][: -len(tokens)]
        next_id, logits = oracle.first_draft(known[:-1])
        assert next_id == known[-1] or known == prompt
        following = oracle.greedy(known, 1).token_ids[0]
        if next_id == known[-1]:
            expected.append((int(logits.argmax()) == following, len(tokens)))
    assert [len_ == 2 for right, len_ in expected] == [right for right, _ in expected]
    assert sum(right for right, _ in expected) >= 4


def test_sampled_text_is_the_one_without_drafts(
    rank: RankProcess, tiny_deepseek: Path, tiny_prompt_ids: list[int]
) -> None:
    """With penalties and log-probabilities: a second token is drawn as if the first were old."""
    plain = SamplingParams(max_tokens=1000, temperature=0.7, top_p=0.9, seed=11, logprobs=2)
    penalised = msgspec.structs.replace(
        plain, temperature=0.2, presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.05
    )
    prompt = tiny_prompt_ids[:40]
    with RankProcess(rank_config(tiny_deepseek)) as without:
        without.wait_ready()
        for request_id, sampling in enumerate((plain, penalised), start=2000):
            passes = drafted(rank, request_id, prompt, sampling)
            tokens = [token for tokens in passes for token in tokens]
            wanted = without.generate(
                request_id, prompt, len(tokens), list(range(20)), sampling=sampling
            )
            assert [t.token_id for t in tokens] == [t.token_id for t in wanted]
            assert [t.logprob for t in tokens] == pytest.approx(
                [t.logprob for t in wanted], abs=1e-4
            )
            assert len(passes) < len(tokens)  # some stood
