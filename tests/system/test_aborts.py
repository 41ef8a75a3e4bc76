"""Clients leave at every stage: pages come back under the rules, and nobody else is touched."""

from __future__ import annotations

import random
import signal
import time

import httpx
import pytest

from tests.oracle.transformers_oracle import Oracle
from tests.system.cluster import LAYERS, NUM_PAGES, PAGE, Cluster
from tests.system.nodes import wait_until
from tests.system.prompts import prompt_of

ROUNDS = 25


@pytest.mark.parametrize("stream", [False, True])
def test_client_leaves_while_its_prompt_is_queued(
    cluster: Cluster, tiny_oracle: Oracle, tiny_prompt_ids: list[int], stream: bool
) -> None:
    """The prefiller is busy with another prompt, so this one has nothing written and no source
    pages.
    """
    node = cluster.decoder
    aborted = node.counts()["aborted"]
    other = prompt_of(tiny_prompt_ids, 60)
    first = cluster.call_with_stopped_rank(other, 8)
    second = node.call(prompt_of(tiny_prompt_ids, 90, shift=7), 8, stream=stream)
    node.wait_count("transfers_open", 2)
    told = httpx.get(f"http://{cluster.prefiller.address}/pdx/transfers").json()
    assert [(each["state"], each["num_tokens"]) for each in told["live"]] == [
        ("open", 59),
        ("queued", 89),
    ]
    assert told["ranks"][0]["num_layers"] == LAYERS
    second.leave()
    node.wait_count("aborted", aborted + 1)
    cluster.prefiller.wait_status(
        lambda status: status["transfers_open"] == 1, what="the prefiller drops it"
    )
    wait_until(lambda: node.counts()["transfers_open"] == 1, timeout_s=2, what="it is settled")
    assert node.counts()["pages_quarantined"] == 0
    cluster.resume_rank()
    assert tiny_oracle.greedy(other, 8).agrees_with(first.token_ids())
    cluster.check_alive(tiny_oracle, prompt_of(tiny_prompt_ids, 130))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("partly_written", [False, True])
def test_client_leaves_while_its_prompt_runs(
    cluster: Cluster,
    tiny_oracle: Oracle,
    tiny_prompt_ids: list[int],
    stream: bool,
    partly_written: bool,
) -> None:
    """What is posted is drained without the rank. The prefiller's own pages wait for the chunk that
    its rank is in; the decoder's are free for the next request meanwhile.
    """
    node = cluster.decoder
    begin = (
        cluster.call_stopped_in_mid_transfer if partly_written else cluster.call_with_stopped_rank
    )
    call = begin(prompt_of(tiny_prompt_ids, 400), 16, stream=stream)
    aborted = node.counts()["aborted"]
    call.leave()
    node.wait_count("aborted", aborted + 1)
    node.wait_clean()
    assert cluster.prefiller.status()["pages_quarantined"] > 0
    cluster.resume_rank()
    cluster.prefiller.wait_clean()
    cluster.check_alive(tiny_oracle, prompt_of(tiny_prompt_ids, 130))


def test_request_waits_for_pages_until_an_aborted_transfer_is_counted_out(
    cluster: Cluster, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    """The prefiller's primary is stopped for less than its beats may be missing, so it cannot
    answer the cancel: nobody else gets the pages.
    """
    node = cluster.decoder
    aborted = node.counts()["aborted"]
    first, second = prompt_of(tiny_prompt_ids, 400), prompt_of(tiny_prompt_ids, 390, shift=11)
    call = cluster.call_stopped_in_mid_transfer(first, 16)
    assert 2 * (400 // PAGE) > NUM_PAGES, "both must not fit"
    cluster.prefiller.signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    call.leave()
    node.wait_count("aborted", aborted + 1, timeout_s=1)
    waiting = node.call(second, 64)
    node.wait_count("requests_waiting", 1, timeout_s=1)
    counts = node.counts()
    assert counts["pages_quarantined"] == -(-(400 + 16) // PAGE)
    assert counts["requests_active"] == 0
    cluster.prefiller.signal(signal.SIGCONT)
    assert time.monotonic() - stopped_s < 1.5, "too slow a machine: the link may be lost by now"
    cluster.resume_rank()
    assert tiny_oracle.greedy(second, 64).agrees_with(waiting.token_ids())
    cluster.check_alive(tiny_oracle, prompt_of(tiny_prompt_ids, 130))


def test_client_leaves_while_tokens_are_generated(
    cluster: Cluster, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    node = cluster.decoder
    for num, stream in enumerate([True, False], node.counts()["aborted"] + 1):
        call = node.call(prompt_of(tiny_prompt_ids, 33), 400, stream=stream)
        if stream:
            assert call.wait_head() == 200
        else:
            node.wait_count("pages_filled", 1)
        call.leave()
        node.wait_count("aborted", num)
        node.wait_clean()
    cluster.check_alive(tiny_oracle, prompt_of(tiny_prompt_ids, 130))


def test_clients_leave_at_any_moment(
    cluster: Cluster, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    """Prompts that fill most of the pages, given up after delays from nothing to the whole
    request.
    """
    node = cluster.decoder
    moments = random.Random(2)
    for i in range(ROUNDS):
        length = moments.choice([2, 16, 17, 60, 200, 400])
        call = node.call(prompt_of(tiny_prompt_ids, length, shift=i), 20, stream=bool(i % 2))
        time.sleep(moments.uniform(0, 0.002 * length))  # the moment is the point
        call.leave()
        wait_until(lambda: node.health()["streams"] == 0, timeout_s=2, what="the frontend knows")
        # Counts are a tenth of a second old at most; those that tell of this one are newer.
        finished = node.counts()["finished"]
        node.complete(tiny_prompt_ids[:1], 1)
        node.wait_count("finished", finished + 1)
        node.wait_clean()
        cluster.prefiller.wait_clean()
    cluster.check_alive(tiny_oracle, prompt_of(tiny_prompt_ids, 130))
