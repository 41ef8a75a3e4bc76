"""Ends that are no fault of a node move no fault; each has a count of its own."""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from pathlib import Path

from tests.system.conftest import Pair
from tests.system.nodes import Decoder, Prefiller, decoder, moved
from tests.system.prompts import prompt_of

ENDS = ("finished", "aborted", "timed_out")


def ends(node: Decoder) -> Counter[str]:
    """How its requests ended."""
    return Counter({end: node.counts()[end] for end in ENDS})


def test_a_request_that_takes_too_long_is_counted_as_that_and_moves_no_fault(
    any_prefiller: Prefiller, tmp_path: Path, tiny_prompt_ids: list[int]
) -> None:
    options = ["--kv-memory", "16M", "--request-timeout", "0.5"]
    with decoder(any_prefiller.address, tmp_path / "log", *options) as node:
        faults = any_prefiller.faults()
        os.kill(any_prefiller.child("pdx.runner"), signal.SIGSTOP)
        try:
            answer = node.post(prompt_of(tiny_prompt_ids, 100), 4)
        finally:
            os.kill(any_prefiller.child("pdx.runner"), signal.SIGCONT)
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout")
        node.wait_count("timed_out", 1)
        assert +ends(node) == {"timed_out": 1}
        node.wait_clean()
        assert not node.faults()
    assert not moved(any_prefiller, faults)


def test_a_client_that_leaves_and_a_prompt_that_is_refused_move_no_fault(
    pair: Pair, tiny_prompt_ids: list[int]
) -> None:
    node, source = pair.decoder, pair.prefiller
    node.wait_clean()  # what an earlier test has left counts a moment later
    before, faults, its_faults = ends(node), node.faults(), source.faults()
    call = node.call(prompt_of(tiny_prompt_ids, 40), 400, stream=True)
    assert call.wait_head() == 200
    call.leave()
    node.wait_count("aborted", before["aborted"] + 1)
    assert node.post([10**6], 4).status_code == 400
    node.wait_clean()
    assert ends(node) - before == {"aborted": 1}
    assert not moved(node, faults)
    assert not moved(source, its_faults)


def test_a_probe_of_health_is_no_bad_connection(pair: Pair) -> None:
    faults = pair.prefiller.faults()
    host, port = pair.prefiller.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=5) as probe:
        probe.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
        assert probe.recv(12) == b"HTTP/1.1 200"
    assert not moved(pair.prefiller, faults)
