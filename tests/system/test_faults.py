"""Nodes and processes die, hang and come back: the others decide in time, leak nothing, go on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.oracle.transformers_oracle import Oracle
from tests.system.calls import Call
from tests.system.cluster import Cluster
from tests.system.nodes import (
    Prefiller,
    decoder,
    end,
    is_alive,
    moved,
    prefiller,
    start,
    wait_until,
)
from tests.system.prompts import prompt_of

#: Within this the loss of a node is seen and decided.
DECIDED_S = 2.0
#: A stopped node is only missed by its beats, two seconds after the last one.
MISSED_S = 3.0


def test_prefiller_killed_in_mid_transfer_comes_back(
    cluster: Cluster, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    node, address = cluster.decoder, cluster.prefiller.address
    short = prompt_of(tiny_prompt_ids, 17)
    running = node.call(short, 400, stream=True)
    assert running.wait_head() == 200
    prompt = prompt_of(tiny_prompt_ids, 300)
    call = cluster.call_stopped_in_mid_transfer(prompt, 16)
    node.wait_count("pages_in_flight", 1)
    here, faults = node.counts()["prefills_here"], node.faults()

    cluster.prefiller.kill()
    node.wait_count("prefills_here", here + 1, timeout_s=DECIDED_S)
    assert tiny_oracle.greedy(prompt, 16).agrees_with(call.token_ids())
    wait_until(
        lambda: not any(node.counts()[f"pages_{s}"] for s in ("in_flight", "quarantined")),
        timeout_s=DECIDED_S,
        what="the pages of the lost transfer come back",
    )
    assert node.counts()["transfers_open"] == 0
    assert tiny_oracle.greedy(short, 400).agrees_with(running.token_ids())
    node.wait_clean()

    assert node.health()["status"] == "ok"
    assert "prefilled here" in node.health()["detail"]
    assert tiny_oracle.greedy(short, 4).agrees_with(node.complete(short, 4))

    cluster.start_prefiller(address)
    assert cluster.prefiller.address == address
    node.wait_healthy()
    assert moved(node, faults) == {"connection_lost": 1}
    assert not cluster.prefiller.faults()
    cluster.check_alive(tiny_oracle, prompt_of(tiny_prompt_ids, 100))


def test_stopped_prefiller_is_missed_and_taken_back(
    cluster: Cluster, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    node = cluster.decoder
    prompt, here = prompt_of(tiny_prompt_ids, 300), node.counts()["prefills_here"]
    faults, its_faults = node.faults(), cluster.prefiller.faults()
    call = cluster.call_stopped_in_mid_transfer(prompt, 16)
    cluster.prefiller.signal_family(signal.SIGSTOP)
    node.wait_count("prefills_here", here + 1, timeout_s=MISSED_S)
    assert tiny_oracle.greedy(prompt, 16).agrees_with(call.token_ids())
    node.wait_clean(DECIDED_S)

    cluster.prefiller.signal_family(signal.SIGCONT)
    node.wait_healthy()
    # The prefiller finds it too when it goes on, or is told of it: both are one fault.
    assert moved(node, faults) == moved(cluster.prefiller, its_faults) == {"no_beat": 1}
    cluster.check_alive(tiny_oracle, prompt_of(tiny_prompt_ids, 100))


def test_decoder_killed_in_mid_transfer(
    cluster: Cluster, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    cluster.call_stopped_in_mid_transfer(prompt_of(tiny_prompt_ids, 300), 16)
    faults = cluster.prefiller.faults()
    cluster.decoder.kill()
    cluster.resume_rank()  # what it runs still writes its own pages
    cluster.prefiller.wait_clean(DECIDED_S)
    assert moved(cluster.prefiller, faults) == {"connection_lost": 1}
    assert cluster.prefiller.status()["links_open"] == 0
    cluster.start_decoder()
    cluster.check_alive(tiny_oracle, prompt_of(tiny_prompt_ids, 100))


def lose_a_stopped_decoder(cluster: Cluster, prompt: list[int]) -> Call:
    """A decoder is stopped, then a whole prompt is written to it, and it is missed. Over shm the
    target pulls, also when it wakes up after the link's end: only there source pages stay held.
    """
    source = cluster.prefiller
    before = len(source.stderr())
    call = cluster.call_with_stopped_rank(prompt, 16)
    cluster.decoder.signal(signal.SIGSTOP)
    cluster.resume_rank()
    wait_until(
        lambda: "ended: data path lost: no beat" in source.stderr()[before:],
        timeout_s=MISSED_S + 1,
        what="the stopped decoder is missed",
    )
    source.wait_status(lambda status: status["requests_active"] == 0, what="the pass is over")
    if cluster.provider == "shm":
        assert source.status()["pages_quarantined"] > 0
    else:
        source.wait_clean(DECIDED_S)
    return call


def test_stopped_decoder_gives_source_pages_back_when_it_goes_on(
    cluster: Cluster, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 300)
    faults, its_faults = cluster.prefiller.faults(), cluster.decoder.faults()
    call = lose_a_stopped_decoder(cluster, prompt)
    cluster.decoder.signal(signal.SIGCONT)
    # All was written, and the source pages are still held: whether the decoder counts it before it
    # learns of the link's end is a race. What it must not do is to answer with other tokens.
    assert tiny_oracle.greedy(prompt, 16).agrees_with(call.token_ids())
    cluster.prefiller.wait_clean()
    cluster.decoder.wait_healthy()
    cluster.decoder.wait_clean()
    assert moved(cluster.prefiller, faults) == moved(cluster.decoder, its_faults) == {"no_beat": 1}
    cluster.check_alive(tiny_oracle, prompt_of(tiny_prompt_ids, 100))


@pytest.mark.parametrize("session_cluster", ["shm"], indirect=True)
def test_stopped_decoder_gives_source_pages_back_when_it_is_killed(
    cluster: Cluster, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    lose_a_stopped_decoder(cluster, prompt_of(tiny_prompt_ids, 300))
    cluster.decoder.kill()
    cluster.prefiller.wait_clean()
    cluster.start_decoder()
    cluster.check_alive(tiny_oracle, prompt_of(tiny_prompt_ids, 100))


@pytest.mark.parametrize(
    ("child", "named"), [("pdx.runner", "the rank"), ("pdx.server", "the frontend")]
)
def test_decoder_stops_when_one_of_its_processes_dies(
    any_prefiller: Prefiller, tmp_path: Path, tiny_prompt_ids: list[int], child: str, named: str
) -> None:
    with decoder(any_prefiller.address, tmp_path / "decode.log", "--kv-memory", "16M") as node:
        call = node.call(prompt_of(tiny_prompt_ids, 40), 400, stream=True)
        assert call.wait_head() == 200
        family = node.family()
        os.kill(node.child(child), signal.SIGKILL)
        assert node.process.wait(timeout=5) == 1
        assert f"error: {named}" in node.stderr()
        assert "SIGKILL" in node.stderr()
        wait_until(lambda: not any(map(is_alive, family)), timeout_s=2, what="its processes end")
    any_prefiller.wait_clean()


def test_ctrl_c_ends_both_nodes_cleanly(
    tiny_llama: Path, tmp_path: Path, tiny_prompt_ids: list[int]
) -> None:
    """A terminal sends SIGINT to every process of the group, in the middle of a request too."""
    kv = ["--kv-memory", "16M"]
    with (
        prefiller(tiny_llama, tmp_path / "prefill.log", *kv) as source,
        decoder(source.address, tmp_path / "decode.log", *kv) as target,
    ):
        ours = [*source.family(), *target.family()]
        call = target.call(prompt_of(tiny_prompt_ids, 40), 400, stream=True)
        assert call.wait_head() == 200
        for node in (target, source):
            began_s = time.monotonic()
            os.killpg(node.pid, signal.SIGINT)
            assert node.process.wait(timeout=10) == 0, node.stderr()
            assert time.monotonic() - began_s < 5
            assert "Traceback" not in node.stderr()
    wait_until(lambda: not any(map(is_alive, ours)), timeout_s=2, what="all processes end")
    left = [
        path.name
        for path in Path("/dev/shm").glob("*")
        if any(f"-{pid}-" in path.name for pid in ours)
    ]
    assert not left


@pytest.mark.parametrize("module", ["pdx.runner", "pdx.server"])
def test_ctrl_c_while_a_process_starts_is_quiet(
    tiny_llama: Path, tmp_path: Path, module: str
) -> None:
    """It comes when the process is there, before that can have said what it does on SIGINT."""
    node = start(["serve", str(tiny_llama), "--colocated", "--kv-memory", "16M"], tmp_path / "log")
    try:
        wait_until(lambda: node.has_child(module), timeout_s=30, what=f"{module} starts")
        os.killpg(node.pid, signal.SIGINT)
        assert node.process.wait(timeout=10) == 0
        assert "Traceback" not in node.stderr()
    finally:
        end(node)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_twenty_decoders_come_and_go(
    any_prefiller: Prefiller, tmp_path: Path, tiny_prompt_ids: list[int]
) -> None:
    """Each offers shm and tcp and withdraws one of them; every third dies instead of leaving."""
    prompt = prompt_of(tiny_prompt_ids, 40)
    answers = []
    for i in range(20):
        log = tmp_path / f"decode-{i}.log"
        with decoder(any_prefiller.address, log, "--fabric", "auto", "--kv-memory", "16M") as node:
            answers.append(node.complete(prompt, 24))
            if i % 3 == 0:
                node.kill()
    assert all(answer == answers[0] for answer in answers)
    any_prefiller.wait_clean()
    assert any_prefiller.status()["links_open"] == 0
