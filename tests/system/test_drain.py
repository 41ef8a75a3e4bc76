"""SIGTERM: what runs is finished, what is new is refused, exit 0; a second one ends at once."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.oracle.transformers_oracle import Oracle
from tests.system.cluster import Cluster
from tests.system.nodes import Prefiller, decoder, end, is_alive, start, wait_until
from tests.system.prompts import prompt_of

KV = ["--kv-memory", "16M"]
RANK = "pdx.runner"


def test_a_decoder_finishes_its_streams_and_refuses_new_ones(
    any_prefiller: Prefiller, tmp_path: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 40)
    with decoder(any_prefiller.address, tmp_path / "decode.log", *KV) as node:
        family = node.family()
        call = node.call(prompt, 400, stream=True)
        assert call.wait_head() == 200
        node.signal_child(RANK, signal.SIGSTOP)
        node.signal(signal.SIGTERM)
        wait_until(
            lambda: node.health()["detail"] == "draining", timeout_s=5, what="it says that it ends"
        )
        assert node.health()["status"] == "unhealthy"
        refused = node.post(prompt, 4)
        assert refused.status_code == 503
        assert "this node is draining" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        node.signal_child(RANK, signal.SIGCONT)
        assert tiny_oracle.greedy(prompt, 400).agrees_with(call.token_ids())
        assert node.process.wait(timeout=10) == 0
        assert "Traceback" not in node.stderr()
        wait_until(lambda: not any(map(is_alive, family)), timeout_s=2, what="its processes end")
    any_prefiller.wait_clean()


def test_a_prefiller_finishes_its_prompts_and_gets_no_new_ones(
    cluster: Cluster, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    node, source = cluster.decoder, cluster.prefiller
    prompt, other = prompt_of(tiny_prompt_ids, 300), prompt_of(tiny_prompt_ids, 60, shift=5)
    call = cluster.call_stopped_in_mid_transfer(prompt, 16)
    here, retried = node.counts()["prefills_here"], node.counts()["prefills_retried"]
    source.signal(signal.SIGTERM)
    wait_until(lambda: not node.counts()["prefillers"], timeout_s=5, what="the decoder knows")
    assert source.process.poll() is None
    assert tiny_oracle.greedy(other, 16).agrees_with(node.complete(other, 16))
    node.wait_count("prefills_here", here + 1)
    cluster.resume_rank()
    assert tiny_oracle.greedy(prompt, 16).agrees_with(call.token_ids())
    assert source.process.wait(timeout=10) == 0
    assert "Traceback" not in source.stderr()
    assert node.counts()["prefills_retried"] == retried
    node.wait_clean()


def test_a_node_that_still_loads_ends_at_the_first_sigterm(
    tiny_llama: Path, tmp_path: Path
) -> None:
    node = start(["serve", str(tiny_llama), "--colocated", *KV], tmp_path / "log")
    try:
        wait_until(lambda: node.has_child(RANK), timeout_s=30, what="it loads")
        node.signal(signal.SIGTERM)
        assert node.process.wait(timeout=10) == 0
    finally:
        end(node)
    assert "Traceback" not in node.stderr()
