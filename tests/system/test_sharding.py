"""Two unlike prefillers, prefix caches on both sides: tokens are those of one whole model, and no
byte moves that was there. All ratios of ranks: ``test_ratios``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.oracle.transformers_oracle import Oracle
from tests.system.nodes import wait_until
from tests.system.prompts import prompt_of
from tests.system.sharing import (
    HOLDERS,
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
def test_tokens_and_bytes_with_two_unlike_prefillers(cluster: Cluster) -> None:
    cluster.check_lengths()


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("holder", HOLDERS)
def test_only_missing_pages_move_and_each_to_its_place(
    cluster: Cluster, holder: str, probe: str
) -> None:
    cluster.check_prefix(0, holder, probe)


@pytest.mark.parametrize("length", [4 * PAGE - 1, 4 * PAGE, 4 * PAGE + 1])
@pytest.mark.parametrize("num_known", [0, 1, 4])
def test_lengths_around_a_page_with_some_pages_known(
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


def test_choices_of_one_prompt_share_its_transfer(
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
def test_prompts_below_the_threshold_are_computed_by_the_decoder(
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
