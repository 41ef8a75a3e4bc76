"""One of a node's ranks is killed: clients, peers and the supervisor hear of it in two seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.oracle.transformers_oracle import Oracle
from tests.system.nodes import Decoder, Node, Prefiller, decoder, is_alive, prefiller, wait_until
from tests.system.prompts import prompt_of
from tests.system.test_serve import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
HEARD_S = 2.0
OPTIONS = ["--kv-memory", "16M", "--tp", "2"]


@contextmanager
def node_of(role: str, model: Path, prefill_node: Prefiller, logs: Path) -> Iterator[Decoder]:
    """A node of two ranks that clients can ask."""
    if role == "colocated":
        with serving(model, logs / "log", "--colocated", "--tp", "2") as node:
            yield node
    else:
        with decoder(prefill_node.address, logs / "log", *OPTIONS) as node:
            yield node


def kill_a_rank(node: Node) -> tuple[int, float]:
    """Kill the rank that does not lead; its process id and when."""
    victim = max(node.children("pdx.runner"))
    os.kill(victim, signal.SIGKILL)
    return victim, time.monotonic()


@pytest.mark.parametrize("role", ["decode", "colocated"])
def test_clients_of_a_dead_rank_hear_and_its_node_ends_with_the_cause(
    role: str,
    any_prefiller: Prefiller,
    tiny_llama: Path,
    tiny_oracle: Oracle,
    tiny_prompt_ids: list[int],
    tmp_path: Path,
) -> None:
    with node_of(role, tiny_llama, any_prefiller, tmp_path) as node:
        prompt = prompt_of(tiny_prompt_ids, 100)
        assert tiny_oracle.greedy(prompt, 24).agrees_with(node.complete(prompt, 24))
        streamed = node.call(prompt, 400, stream=True)
        assert streamed.wait_head() == 200
        whole = node.call(prompt, 400)
        wait_until(lambda: node.counts()["requests_active"] == 2, timeout_s=5, what="both run")
        family = node.family()
        victim, killed_s = kill_a_rank(node)
        assert streamed.error()["message"] == "the engine has stopped"
        status, body = whole.answer()
        assert (status, body["error"]["message"]) == (503, "the engine has stopped")
        assert time.monotonic() - killed_s < HEARD_S
        assert node.process.wait(timeout=10) == 1
        assert f"rank 1 of 2 (pid {victim}) was killed by SIGKILL" in node.stderr()
        wait_until(lambda: not any(map(is_alive, family)), timeout_s=2, what="its processes end")
    any_prefiller.wait_clean()


def test_a_decoder_hears_of_a_prefillers_dead_rank_and_serves_its_client_alone(
    tiny_llama: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int], tmp_path: Path
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 100)
    with (
        prefiller(tiny_llama, tmp_path / "prefill", *OPTIONS) as lost,
        decoder(lost.address, tmp_path / "decode", "--kv-memory", "16M") as node,
    ):
        for pid in lost.children("pdx.runner"):
            os.kill(pid, signal.SIGSTOP)
        call = node.call(prompt, 24)
        node.wait_count("transfers_open", 1)
        victim, _ = kill_a_rank(lost)
        wait_until(lambda: node.counts()["prefillers"] == 0, timeout_s=HEARD_S, what="it is missed")
        assert tiny_oracle.greedy(prompt, 24).agrees_with(call.token_ids())
        node.wait_clean()
        assert node.faults() == {"peer_failed": 1}
        lost.signal_family(signal.SIGCONT)
        assert lost.process.wait(timeout=10) == 1
        assert f"rank 1 of 2 (pid {victim}) was killed by SIGKILL" in lost.stderr()
