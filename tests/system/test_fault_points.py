"""Faults that nodes commit on purpose (PDX_FAULT), each in the place where others have failed: the
answers are right or say why not, and no page is lost.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.oracle.transformers_oracle import Oracle
from tests.system.nodes import decoder, prefiller, run_to_end, wait_until
from tests.system.prompts import prompt_of

PAGE = 16
KV = ["--kv-memory", "16M"]
REMOTE = ["--no-local-fallback", *KV]


def test_an_unknown_fault_is_a_usage_error(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDX_FAULT", "stall-write@layer1,lose-page@3")
    command = ["prefill", "--model", str(tiny_llama), *KV]
    code, _, said = run_to_end(command, tmp_path / "log", timeout_s=10)
    assert code == 2
    assert "error: PDX_FAULT: there is no fault 'lose-page@3'" in said
    assert "fail-post[@pageN]" in said


def test_pages_under_a_stalled_write_belong_to_nobody_else(
    tiny_llama: Path, tmp_path: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    """Also delay-ack. Neither node has pages for two prompts at once."""
    prompt, other = prompt_of(tiny_prompt_ids, 100), prompt_of(tiny_prompt_ids, 100, shift=7)
    tight = ["--pages", str(-(-100 // PAGE) + 3)]
    fault = "stall-write@layer1,delay-ack@50"
    with (
        prefiller(tiny_llama, tmp_path / "p.log", *tight, PDX_FAULT=fault) as source,
        decoder(source.address, tmp_path / "d.log", *tight, "--no-local-fallback") as node,
    ):
        left = node.call(prompt, 16)
        source.wait_status(lambda status: status["atoms_posted"] > 0, what="a layer is written")
        node.wait_count("pages_in_flight", 1)
        waiting = node.call(other, 16)
        node.wait_count("requests_waiting", 1)
        left.leave()
        node.wait_count("aborted", 1)
        source.wait_status(lambda status: status["transfers_open"] == 1, what="the other is there")
        # A prompt more: it waits for source pages, which the stalled writes still read.
        third = node.call(prompt, 16)
        source.wait_status(lambda s: s["requests_active"] == 0, what="the pass is over")
        assert source.status()["pages_filled"] > 0
        source.signal(signal.SIGUSR2)
        assert tiny_oracle.greedy(other, 16).agrees_with(waiting.token_ids())
        node.wait_count("transfers_open", 1)
        source.wait_status(lambda s: s["pages_filled"] > 0, what="it stalls again")
        source.signal(signal.SIGUSR2)
        assert tiny_oracle.greedy(prompt, 16).agrees_with(third.token_ids())
        node.wait_clean()
        source.wait_clean()
        assert node.counts()["imms_stale"] == 0
        assert not node.faults() and not source.faults()


def test_what_a_prefiller_cannot_do_is_told_and_what_a_decoder_misses_is_found(
    tiny_llama: Path, tmp_path: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    """What fails is tried three times, for there is no other prefiller, and then fails with its
    reason. The decoder misses its fifth complete count, and notices the others twice.
    """
    short, long = prompt_of(tiny_prompt_ids, 3 * PAGE), prompt_of(tiny_prompt_ids, 5 * PAGE)
    wanted = tiny_oracle.greedy(short, 16)
    at_source = {"PDX_FAULT": "reject-prefill@3,fail-post@page3"}
    here = {"PDX_FAULT": "drop-completion@5,dup-completion"}
    options = [*REMOTE, "--breaker-rate", "2"]
    with (
        prefiller(tiny_llama, tmp_path / "p.log", *KV, **at_source) as source,
        decoder(source.address, tmp_path / "d.log", *options, **here) as node,
    ):
        rejected = node.post(short, 4)
        assert rejected.status_code == 503
        assert "the prefiller rejects prompts" in rejected.json()["error"]["message"]
        failed = node.post(long, 4)
        assert failed.status_code == 503
        assert failed.json()["error"]["type"] == "transfer_failed"
        assert "posted" in failed.json()["error"]["message"]
        assert failed.headers["retry-after"]
        node.wait_clean()
        source.wait_clean()
        assert wanted.agrees_with(node.complete(short, 16))
        node.wait_count("prefills_retried", 4)
        faults = {"prompt_rejected": 3, "post_failed": 3}
        assert node.faults() == source.faults() == faults
        assert wanted.agrees_with(node.complete(short, 16))
        node.wait_count("prefills_retried", 5)
        node.wait_count("faults_lost_completion", 1)
        assert node.faults() == source.faults() == faults | {"lost_completion": 1}
        assert "writes were lost: 9 of 9 atoms counted" in node.stderr()
        assert wanted.agrees_with(node.complete(short, 16))
        node.wait_clean()
        source.wait_clean()


@pytest.mark.slow
def test_a_prefiller_that_dies_between_two_layers_is_replaced(
    tiny_llama: Path, tmp_path: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 100)
    with (
        prefiller(tiny_llama, tmp_path / "p.log", *KV, PDX_FAULT="kill-after-layer@1") as dying,
        decoder(dying.address, tmp_path / "d.log", *KV) as node,
    ):
        assert tiny_oracle.greedy(prompt, 16).agrees_with(node.complete(prompt, 16))
        assert dying.process.wait(timeout=5) == -signal.SIGKILL
        node.wait_count("prefills_here", 1)
        node.wait_clean()
        assert node.faults() == {"connection_lost": 1}


@pytest.mark.slow
def test_a_prefiller_without_a_heartbeat_is_left_and_tried_again(
    tiny_llama: Path, tmp_path: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 100)
    with (
        prefiller(tiny_llama, tmp_path / "p.log", *KV, PDX_FAULT="no-heartbeat") as source,
        decoder(source.address, tmp_path / "d.log", *KV) as node,
    ):
        node.wait_count("faults_no_beat", 2, timeout_s=20)
        assert "no beat" in node.stderr()
        assert tiny_oracle.greedy(prompt, 16).agrees_with(node.complete(prompt, 16))
        node.wait_clean()


@pytest.mark.slow
def test_a_breaker_opens_prompts_run_here_and_a_probe_heals_it(
    tiny_llama: Path, tmp_path: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 40)
    wanted = tiny_oracle.greedy(prompt, 8)
    fault = "reject-prefill@5"
    options = [*KV, "--breaker-pause", "1"]
    with (
        prefiller(tiny_llama, tmp_path / "p.log", *KV, PDX_FAULT=fault) as source,
        decoder(source.address, tmp_path / "d.log", *options) as node,
    ):
        for _ in range(5):
            assert wanted.agrees_with(node.complete(prompt, 8))
        node.wait_count("breakers_opened", 1)
        assert node.counts()["prefills_here"] == node.counts()["prefills_retried"] == 5

        def is_healed() -> bool:
            answer = node.post(prompt, 8).json()
            assert wanted.agrees_with(answer["choices"][0]["token_ids"])
            return node.timeline(answer["id"])["prefiller"] == source.address

        wait_until(is_healed, timeout_s=10, what="a probe has gone there")
        assert is_healed()
        assert node.faults() == source.faults() == {"prompt_rejected": 5}
        node.wait_clean()


def test_a_breaker_forgets_what_another_process_failed(
    tiny_llama: Path, tmp_path: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 40)
    wanted = tiny_oracle.greedy(prompt, 8)
    options = [*KV, "--breaker-pause", "3600"]
    with prefiller(tiny_llama, tmp_path / "p0.log", *KV, PDX_FAULT="reject-prefill") as broken:
        address = broken.address
        with decoder(address, tmp_path / "d.log", *options) as node:
            for _ in range(5):
                assert wanted.agrees_with(node.complete(prompt, 8))
            node.wait_count("breakers_opened", 1)
            broken.kill()
            wait_until(lambda: not node.counts()["prefillers"], timeout_s=5, what="it is missed")
            with prefiller(tiny_llama, tmp_path / "p1.log", *KV, "--listen", address):
                node.wait_healthy()
                answer = node.post(prompt, 8).json()
                assert wanted.agrees_with(answer["choices"][0]["token_ids"])
                assert node.timeline(answer["id"])["prefiller"] == address
                node.wait_clean()
