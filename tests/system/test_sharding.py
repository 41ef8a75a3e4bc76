"""Nodes of several ranks and unlike pages, prefix caches on both sides, several peers: tokens are
those of one whole model, and no byte moves that was there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.oracle.transformers_oracle import Oracle
from tests.system.nodes import Decoder, Prefiller, decoder, prefiller, wait_until
from tests.system.prompts import prompt_of
from tests.system.sharing import (
    HOLDERS,
    LENGTHS,
    LOCAL_BELOW,
    NUM_TOKENS,
    PAGE,
    PROBES,
    TOKEN_BYTES,
    Cluster,
    Shape,
    cluster_of,
)


@pytest.fixture(scope="module")
def cluster(
    tiny_llama: Path,
    tiny_oracle: Oracle,
    tiny_prompt_ids: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """Two prefillers: two ranks, pages as the decoder's; one rank, larger pages."""
    shapes = [Shape(tp_size=2, chunk=24), Shape(page_size=2 * PAGE, chunk=40)]
    logs = tmp_path_factory.mktemp("sharding")
    with cluster_of(shapes, 1, tiny_llama, tiny_oracle, tiny_prompt_ids, logs) as started:
        yield started


@pytest.mark.timeout(300)  # the nodes start here, on a machine that may be busy
def test_d4_tokens_and_bytes_with_two_unlike_prefillers(cluster: Cluster) -> None:
    cluster.check_lengths()


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("holder", HOLDERS)
def test_e1_only_missing_pages_move_and_each_to_its_place(
    cluster: Cluster, holder: str, probe: str
) -> None:
    cluster.check_prefix(0, holder, probe)


@pytest.mark.parametrize("length", [4 * PAGE - 1, 4 * PAGE, 4 * PAGE + 1])
@pytest.mark.parametrize("num_known", [0, 1, 4])
def test_e2_lengths_around_a_page_with_some_pages_known(
    cluster: Cluster,
    tiny_prompt_ids: list[int],
    length: int,
    num_known: int,
) -> None:
    prompt, salt = prompt_of(tiny_prompt_ids, length), f"{length} {num_known}"
    if num_known:
        cluster.ask([*prompt[: num_known * PAGE], 7], cache_salt=salt)
    _, timeline = cluster.ask(prompt, cache_salt=salt)
    known = min(num_known, (length - 1) // PAGE)
    missing = length - 1 - known * PAGE
    moved = 0 if known and missing < PAGE else -(-missing // PAGE)
    assert timeline["transfer_bytes"] == moved * PAGE * TOKEN_BYTES


def test_the_second_turn_of_a_chat_moves_only_the_new_pages(
    cluster: Cluster, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 60)
    body, _ = cluster.ask(prompt, cache_salt="chat")
    turn = [*prompt, *body["choices"][0]["token_ids"], *tiny_prompt_ids[:40]]
    known = (60 + NUM_TOKENS - 1) // PAGE
    body, timeline = cluster.ask(turn, cache_salt="chat")
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == known * PAGE
    moved = -(-(len(turn) - 1) // PAGE) - known
    assert timeline["transfer_bytes"] == moved * PAGE * TOKEN_BYTES


def test_b7_choices_of_one_prompt_share_its_transfer(
    cluster: Cluster, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 100)
    body, _ = cluster.ask(prompt, n=3)
    wanted = tiny_oracle.greedy(prompt, NUM_TOKENS)
    assert all(wanted.agrees_with(choice["token_ids"]) for choice in body["choices"])
    moved = [
        cluster.decoder.timeline(f"{body['id']}?choice={i}")["transfer_bytes"] for i in range(3)
    ]
    assert moved == [-(-99 // PAGE) * PAGE * TOKEN_BYTES, 0, 0]
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("length", [LOCAL_BELOW, LOCAL_BELOW + 1])
def test_e6_prompts_below_the_threshold_are_computed_by_the_decoder(
    cluster: Cluster, tiny_prompt_ids: list[int], length: int
) -> None:
    prompt = prompt_of(tiny_prompt_ids, length)
    _, timeline = cluster.ask(prompt)
    assert (timeline["prefiller"] is None) == (length - 1 < LOCAL_BELOW)


def test_scores_of_a_prompt_are_those_of_one_rank(
    cluster: Cluster, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 40)
    cluster.steer(cluster.prefillers[0])
    answer = cluster.decoder.post(prompt, 1, echo=True, logprobs=0).json()
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"][1:40]
    wanted = tiny_oracle.logits(prompt).log_softmax(-1)
    for position, logprob in enumerate(logprobs, 1):
        assert abs(logprob - float(wanted[position - 1, prompt[position]])) < 1e-3


def test_a_killed_rank_ends_its_node_with_the_cause_and_others_serve_on(
    cluster: Cluster, tiny_prompt_ids: list[int]
) -> None:
    """The last of this cluster's tests."""
    lost, left = cluster.prefillers
    victim = max(lost.children("pdx.runner"))
    os.kill(victim, signal.SIGKILL)
    wait_until(
        lambda: cluster.decoder.counts()["prefillers"] == 1,
        timeout_s=10,
        what="the decoder hears of it",
    )
    assert lost.process.wait(timeout=20) == 1
    said = lost.stderr()
    assert f"(pid {victim}) was killed by SIGKILL" in said
    assert "rank 0 of 2" in said or "rank 1 of 2" in said
    prompt = prompt_of(tiny_prompt_ids, 100)
    for _ in range(2):
        _, timeline = cluster.ask(prompt)
        assert timeline["prefiller"] == left.address


@dataclass(frozen=True, kw_only=True)
class PairShape:
    """How a pair of nodes is started: ranks, page sizes, and the prefiller's chunk."""

    prefill_tp: int
    decode_tp: int
    prefill_page: int = 16
    decode_page: int = 16
    chunk: int

    def __str__(self) -> str:
        pages = f"page{self.prefill_page}to{self.decode_page}"
        return f"tp{self.prefill_tp}to{self.decode_tp}-{pages}-chunk{self.chunk}"


#: The ratios that the cluster lacks, with page sizes and chunks in turn. The tiny model has 2 KV
#: heads, so that 4 ranks hold replicas.
SHAPES = [
    PairShape(prefill_tp=1, decode_tp=1, prefill_page=64, chunk=17),
    PairShape(prefill_tp=1, decode_tp=2, chunk=64),
    PairShape(prefill_tp=1, decode_tp=4, decode_page=64, chunk=24),
    PairShape(prefill_tp=2, decode_tp=2, prefill_page=32, chunk=24),
    PairShape(prefill_tp=2, decode_tp=4, chunk=17),
    PairShape(prefill_tp=4, decode_tp=1, chunk=24),
    PairShape(prefill_tp=4, decode_tp=2, decode_page=8, chunk=64),
    PairShape(prefill_tp=4, decode_tp=4, prefill_page=32, chunk=24),
]


@contextmanager
def pair_of(shape: PairShape, model: Path, logs: Path) -> Iterator[tuple[Prefiller, Decoder]]:
    """The two nodes of a shape."""
    common = ["--fabric", "shm" if shape.prefill_tp == shape.decode_tp else "tcp"]
    common += ["--kv-memory", "16M"]
    on_prefiller = ["--tp", str(shape.prefill_tp), "--page-size", str(shape.prefill_page)]
    on_prefiller += ["--chunk", str(shape.chunk)]
    on_decoder = ["--tp", str(shape.decode_tp), "--page-size", str(shape.decode_page)]
    with (
        prefiller(model, logs / "prefill.log", *common, *on_prefiller) as prefill_node,
        decoder(prefill_node.address, logs / "decode.log", *common, *on_decoder) as decode_node,
    ):
        yield prefill_node, decode_node


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_d1_d2_tokens_and_bytes_of_every_ratio(
    shape: PairShape,
    tiny_llama: Path,
    tiny_oracle: Oracle,
    tiny_prompt_ids: list[int],
    tmp_path: Path,
) -> None:
    copies = max(1, shape.decode_tp // 2)
    run = min(shape.prefill_page, shape.decode_page)
    with pair_of(shape, tiny_llama, tmp_path) as (prefill_node, decode_node):
        for length in LENGTHS:
            prompt = prompt_of(tiny_prompt_ids, length)
            answer = decode_node.post(prompt, NUM_TOKENS).json()
            wanted = tiny_oracle.greedy(prompt, NUM_TOKENS)
            assert wanted.agrees_with(answer["choices"][0]["token_ids"]), length
            moved = decode_node.timeline(answer["id"])["transfer_bytes"]
            assert moved == -(-(length - 1) // run) * run * TOKEN_BYTES * copies
        decode_node.wait_clean()
        prefill_node.wait_clean()
