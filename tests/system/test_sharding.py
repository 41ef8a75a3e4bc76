"""Nodes of several ranks, with unlike pages: tokens are those of one whole model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.oracle.transformers_oracle import Oracle
from tests.system.conftest import Pair
from tests.system.nodes import decoder, prefiller, wait_until
from tests.system.prompts import prompt_of

LENGTHS = [1, 2, 15, 16, 17, 31, 33, 49, 64, 65, 66, 100, 200]
NUM_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a pair of nodes is started: ranks, page sizes, and the prefiller's chunk."""

    prefill_tp: int
    decode_tp: int
    prefill_page: int = 16
    decode_page: int = 16
    chunk: int

    def __str__(self) -> str:
        pages = f"page{self.prefill_page}to{self.decode_page}"
        return f"tp{self.prefill_tp}to{self.decode_tp}-{pages}-chunk{self.chunk}"


#: The tiny model has 2 KV heads, so that ranks 4 hold replicas.
QUICK = Shape(prefill_tp=2, decode_tp=1, decode_page=32, chunk=24)
#: All other ratios; page sizes and chunks in turn.
REST = [
    Shape(prefill_tp=1, decode_tp=1, prefill_page=64, chunk=17),
    Shape(prefill_tp=1, decode_tp=2, chunk=64),
    Shape(prefill_tp=1, decode_tp=4, decode_page=64, chunk=24),
    Shape(prefill_tp=2, decode_tp=2, prefill_page=32, chunk=24),
    Shape(prefill_tp=2, decode_tp=4, chunk=17),
    Shape(prefill_tp=4, decode_tp=1, chunk=24),
    Shape(prefill_tp=4, decode_tp=2, decode_page=8, chunk=64),
    Shape(prefill_tp=4, decode_tp=4, prefill_page=32, chunk=24),
]


@contextmanager
def started(shape: Shape, model: Path, logs: Path, provider: str) -> Iterator[Pair]:
    """The two nodes of a shape."""
    common = ["--fabric", provider, "--kv-memory", "16M"]
    with ExitStack() as stack:
        prefill = prefiller(
            model,
            logs / "prefill.log",
            *common,
            *("--tp", str(shape.prefill_tp)),
            *("--page-size", str(shape.prefill_page)),
            *("--chunk", str(shape.chunk)),
        )
        prefill_node = stack.enter_context(prefill)
        decode = decoder(
            prefill_node.address,
            logs / "decode.log",
            *common,
            *("--tp", str(shape.decode_tp)),
            *("--page-size", str(shape.decode_page)),
        )
        yield Pair(prefill_node, stack.enter_context(decode), provider)


def check_tokens(pair: Pair, shape: Shape, oracle: Oracle, prompt_ids: list[int]) -> None:
    """Every length, and the bytes that each of them moves."""
    layers, kv_heads, head_dim, itemsize = 3, 2, 32, 4
    copies = max(1, shape.decode_tp // kv_heads)
    token_bytes = layers * kv_heads * 2 * head_dim * itemsize * copies
    run = min(shape.prefill_page, shape.decode_page)
    for length in LENGTHS:
        prompt = prompt_of(prompt_ids, length)
        answer = pair.decoder.post(prompt, NUM_TOKENS).json()
        token_ids = answer["choices"][0]["token_ids"]
        assert oracle.greedy(prompt, NUM_TOKENS).agrees_with(token_ids), length
        moved = pair.decoder.timeline(answer["id"])["transfer_bytes"]
        assert moved == -(-(length - 1) // run) * run * token_bytes
    pair.decoder.wait_clean()
    pair.prefiller.wait_clean()


@pytest.fixture(scope="module")
def quick(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The pair of the default tests."""
    with started(QUICK, tiny_llama, tmp_path_factory.mktemp("quick"), "tcp") as pair:
        yield pair


def test_tokens_of_two_ranks_and_other_pages(
    quick: Pair, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    check_tokens(quick, QUICK, tiny_oracle, tiny_prompt_ids)


def test_scores_of_a_prompt_are_those_of_one_rank(
    quick: Pair, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 40)
    answer = quick.decoder.post(prompt, 1, echo=True, logprobs=0).json()
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"][1:40]
    wanted = tiny_oracle.logits(prompt).log_softmax(-1)
    for position, logprob in enumerate(logprobs, 1):
        assert abs(logprob - float(wanted[position - 1, prompt[position]])) < 1e-3


def test_a_killed_rank_ends_its_node_with_the_cause_and_its_peer_hears_of_it(quick: Pair) -> None:
    """The last of this pair's tests."""
    victim = max(quick.prefiller.children("pdx.runner"))
    os.kill(victim, signal.SIGKILL)
    wait_until(
        lambda: quick.decoder.health()["status"] != "ok", timeout_s=10, what="the decoder hears"
    )
    assert quick.prefiller.process.wait(timeout=15) == 1
    said = quick.prefiller.stderr()
    assert f"(pid {victim}) was killed by SIGKILL" in said
    assert "rank 0 of 2" in said or "rank 1 of 2" in said


@pytest.mark.slow
@pytest.mark.parametrize("shape", REST, ids=str)
def test_tokens_of_every_ratio(
    shape: Shape, tiny_llama: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int], tmp_path: Path
) -> None:
    provider = "shm" if shape.decode_tp == shape.prefill_tp else "tcp"
    with started(shape, tiny_llama, tmp_path, provider) as pair:
        check_tokens(pair, shape, tiny_oracle, tiny_prompt_ids)
