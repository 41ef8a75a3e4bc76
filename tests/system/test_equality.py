"""Disaggregated tokens are the colocated engine's, on every fabric, at every length."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.oracle.transformers_oracle import Oracle
from tests.system.conftest import Generate, Pair
from tests.system.prompts import prompt_of

PAGE, CHUNK, CONTEXT = 16, 64, 512
LENGTHS = [1, 2, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * PAGE + 3, 200]


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_equal_the_colocated_engine(
    pair: Pair, colocated: Generate, tiny_prompt_ids: list[int], length: int
) -> None:
    prompt = prompt_of(tiny_prompt_ids, length)
    assert pair.decoder.complete(prompt, 24) == colocated(prompt, 24)
    pair.decoder.wait_clean()


def test_prompt_at_the_limit_of_the_context(
    pair: Pair, colocated: Generate, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, CONTEXT - 1)
    assert pair.decoder.complete(prompt, 1) == colocated(prompt, 1)


@pytest.mark.parametrize(("length", "max_tokens"), [(CONTEXT, 1), (CONTEXT + 1, 1), (0, 1)])
def test_prompt_past_the_limit_or_empty_is_a_400(
    pair: Pair, tiny_prompt_ids: list[int], length: int, max_tokens: int
) -> None:
    prompt = prompt_of(tiny_prompt_ids, length) if length else []
    answer = pair.decoder.post(prompt, max_tokens)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_sixteen_prompts_at_once(
    pair: Pair, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    lengths = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 80, 100, 128, 129, 150, 200]
    prompts = [prompt_of(tiny_prompt_ids, n, shift=3 * i) for i, n in enumerate(lengths)]
    wanted = [tiny_oracle.greedy(prompt, 32) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        got = list(threads.map(lambda prompt: pair.decoder.complete(prompt, 32), prompts))
    assert all(want.agrees_with(ids) for want, ids in zip(wanted, got, strict=True))
    ties = sum(want.token_ids != ids for want, ids in zip(wanted, got, strict=True))
    assert ties <= 0.001 * 16 * 32, f"{ties} of the texts parted at a tie"
    pair.decoder.wait_clean()


def test_the_bytes_that_move_are_the_pages_of_all_but_the_last_token(
    pair: Pair, tiny_prompt_ids: list[int]
) -> None:
    layers, kv_heads, head_dim, itemsize = 3, 2, 32, 4
    page_bytes = kv_heads * 2 * PAGE * head_dim * itemsize
    for length, num_pages in ((1, 0), (17, 1), (18, 2), (130, 9)):
        answer = pair.decoder.post(prompt_of(tiny_prompt_ids, length), 4).json()
        timeline = pair.decoder.timeline(answer["id"])
        assert timeline["transfer_bytes"] == num_pages * layers * page_bytes
        assert timeline["provider"] == (pair.provider if num_pages else None)
