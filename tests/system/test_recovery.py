"""Prefillers fail a request: another one takes it, or the decoder waits, or does it itself."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.oracle.transformers_oracle import Oracle
from tests.system.calls import Call
from tests.system.cluster import CHUNK, Cluster
from tests.system.nodes import Decoder, Prefiller, decoder, prefiller, wait_until
from tests.system.prompts import prompt_of

#: Long, for a machine that is busy; nobody waits for its end.
WAIT_S = "60"


@dataclass
class Trio:
    """Two prefillers, and a decoder that prefills nothing itself."""

    prefillers: list[Prefiller]
    node: Decoder

    def call_on_stopped_rank(self, prompt: list[int]) -> tuple[Call, Prefiller, Prefiller]:
        """A request that is under way to a prefiller whose rank does nothing; that one, and the
        other.
        """
        for each in self.prefillers:
            each.signal_child("pdx.runner", signal.SIGSTOP)
        call = self.node.call(prompt, 16)

        def taker() -> Prefiller | None:
            busy = [each for each in self.prefillers if each.status()["requests_active"]]
            return busy[0] if busy else None

        wait_until(lambda: taker() is not None, timeout_s=10, what="a prefiller has it")
        busy = taker()
        assert busy is not None
        [other] = [each for each in self.prefillers if each is not busy]
        other.signal_child("pdx.runner", signal.SIGCONT)
        return call, busy, other


@pytest.fixture
def trio(tiny_llama: Path, tmp_path: Path) -> Iterator[Trio]:
    with ExitStack() as stack:
        kv = ["--kv-memory", "16M", "--fabric", "tcp"]
        peers = [
            stack.enter_context(
                prefiller(tiny_llama, tmp_path / f"p{i}.log", *kv, "--chunk", str(CHUNK))
            )
            for i in range(2)
        ]
        addresses = ",".join(peer.address for peer in peers)
        remote = ["--no-local-fallback", "--prefiller-wait", WAIT_S]
        node = stack.enter_context(decoder(addresses, tmp_path / "d.log", *kv, *remote))
        wait_until(lambda: node.counts()["prefillers"] == 2, timeout_s=30, what="both are there")
        yield Trio(peers, node)


def test_a_lost_prefillers_prompt_goes_to_another_and_then_waits_for_one(
    trio: Trio, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    node, prompt = trio.node, prompt_of(tiny_prompt_ids, 100)
    wanted = tiny_oracle.greedy(prompt, 16)
    call, dead, other = trio.call_on_stopped_rank(prompt)
    dead.kill()
    status, body = call.answer()
    assert status == 200, body
    assert wanted.agrees_with(body["choices"][0]["token_ids"])
    timeline = node.timeline(body["id"])
    assert timeline["prefiller"] == other.address
    assert timeline["num_retries"] == 1
    node.wait_count("prefills_retried", 1)
    node.wait_clean()

    other.signal_family(signal.SIGSTOP)
    wait_until(lambda: not node.counts()["prefillers"], timeout_s=10, what="it is missed")
    assert node.health()["status"] == "unhealthy"
    waiting = node.call(prompt, 16)
    node.wait_count("requests_waiting", 1)
    other.signal_family(signal.SIGCONT)
    assert wanted.agrees_with(waiting.token_ids())
    assert node.counts()["prefills_here"] == 0
    node.wait_clean()


def test_a_lost_prefillers_prompt_is_scored_by_the_decoder(
    cluster: Cluster, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    node, prompt = cluster.decoder, prompt_of(tiny_prompt_ids, 100)
    fields = {"echo": True, "logprobs": 1}
    wanted = node.post(prompt, 8, **fields).json()["choices"][0]
    here = node.counts()["prefills_here"]
    call = cluster.call_stopped_in_mid_transfer(prompt, 8, **fields)
    cluster.prefiller.kill()
    status, body = call.answer()
    assert status == 200
    found = body["choices"][0]
    assert found["token_ids"] == wanted["token_ids"]
    scores, others = (each["logprobs"]["token_logprobs"] for each in (found, wanted))
    assert len(scores) == len(prompt) + 8
    assert scores[1:] == pytest.approx(others[1:], abs=1e-4)
    node.wait_count("prefills_here", here + 1)
    node.wait_clean()
