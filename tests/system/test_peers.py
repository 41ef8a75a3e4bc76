"""Many prefillers for a decoder, many decoders for a prefiller."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.oracle.transformers_oracle import Oracle
from tests.system.nodes import decoder, prefiller, wait_until
from tests.system.prompts import prompt_of

pytestmark = pytest.mark.timeout(400)  # four nodes start, on a machine that may be busy
MEMORY = ["--kv-memory", "16M"]
NUM_PROMPTS, NUM_TOKENS = 12, 16


def prompts(prompt_ids: list[int]) -> list[list[int]]:
    return [prompt_of(prompt_ids, 40 + 7 * i, shift=3 * i) for i in range(NUM_PROMPTS)]


def test_three_prefillers_share_the_prompts_of_a_decoder(
    tiny_llama: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        peers = [
            stack.enter_context(prefiller(tiny_llama, tmp_path / f"p{i}.log", *MEMORY))
            for i in range(3)
        ]
        addresses = ",".join(peer.address for peer in peers)
        node = stack.enter_context(decoder(addresses, tmp_path / "d.log", *MEMORY))
        wait_until(lambda: node.counts()["prefillers"] == 3, timeout_s=30, what="all are there")
        asked = prompts(tiny_prompt_ids)
        with ThreadPoolExecutor(NUM_PROMPTS) as threads:
            answers = list(threads.map(lambda prompt: node.post(prompt, NUM_TOKENS).json(), asked))
        takers = Counter(node.timeline(answer["id"])["prefiller"] for answer in answers)
        assert set(takers) == {peer.address for peer in peers}
        assert max(takers.values()) <= NUM_PROMPTS // 2
        for prompt, answer in zip(asked, answers, strict=True):
            wanted = tiny_oracle.greedy(prompt, NUM_TOKENS)
            assert wanted.agrees_with(answer["choices"][0]["token_ids"])
        peers[0].kill()
        wait_until(lambda: node.counts()["prefillers"] == 2, timeout_s=10, what="it is missed")
        wanted = tiny_oracle.greedy(asked[0], NUM_TOKENS)
        for _ in range(3):
            assert wanted.agrees_with(node.complete(asked[0], NUM_TOKENS))
        node.wait_clean()


def test_one_prefiller_serves_three_decoders(
    tiny_llama: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        peer = stack.enter_context(prefiller(tiny_llama, tmp_path / "p.log", *MEMORY))
        nodes = [
            stack.enter_context(decoder(peer.address, tmp_path / f"d{i}.log", *MEMORY))
            for i in range(3)
        ]
        asked = [(nodes[i % 3], prompt) for i, prompt in enumerate(prompts(tiny_prompt_ids))]
        with ThreadPoolExecutor(NUM_PROMPTS) as threads:
            got = list(threads.map(lambda pair: pair[0].complete(pair[1], NUM_TOKENS), asked))
        for (_, prompt), token_ids in zip(asked, got, strict=True):
            assert tiny_oracle.greedy(prompt, NUM_TOKENS).agrees_with(token_ids)
        nodes[0].kill()
        peer.wait_status(lambda status: status["links_open"] == 2, what="it is missed")
        wanted = tiny_oracle.greedy(asked[0][1], NUM_TOKENS)
        assert wanted.agrees_with(nodes[1].complete(asked[0][1], NUM_TOKENS))
        for node in nodes[1:]:
            node.wait_clean()
        peer.wait_clean()
