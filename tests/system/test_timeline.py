"""What is told of a request afterwards: its timeline, on both fabrics."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.system.conftest import Pair
from tests.system.nodes import Prefiller, decoder, wait_until
from tests.system.prompts import prompt_of

CHUNK = 64
#: Of an answer that is surely still being written when the prefiller tells its times.
LONG = 200


def test_timeline_tells_of_every_step_in_order(pair: Pair, tiny_prompt_ids: list[int]) -> None:
    prompt = prompt_of(tiny_prompt_ids, 200, shift=3)
    answer = pair.decoder.post(prompt, LONG).json()
    found = pair.decoder.timeline(answer["id"])
    assert (found["prompt_len"], found["output_len"]) == (200, LONG)
    names = ["admitted_s", "dispatched_s", "prefill_start_s", "last_layer_s", "arrived_s"]
    moments = [found[name] for name in [*names, "first_token_s", "finished_s"]]
    assert all(before <= after for before, after in pairwise([0.0, *moments]))
    assert found["last_layer_s"] <= found["posted_s"] <= found["finished_s"]


def test_timeline_tells_of_every_chunk_and_of_what_landed(
    pair: Pair, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 200, shift=5)
    answer = pair.decoder.post(prompt, LONG).json()
    found = pair.decoder.timeline(answer["id"])
    chunks, landed = found["chunks"], found["landed"]
    assert [chunk["end_position"] for chunk in chunks] == [CHUNK, 2 * CHUNK, 3 * CHUNK, 199]
    assert chunks[0]["start_s"] == found["prefill_start_s"]
    for before, after in pairwise(chunks):
        assert before["start_s"] < before["end_s"] <= after["start_s"]
    assert chunks[-1]["start_s"] < found["last_layer_s"]
    assert 2 <= len(landed) <= 16
    for before, after in pairwise(landed):
        assert before["at_s"] <= after["at_s"]
        assert before["share"] <= after["share"]
    assert landed[0]["at_s"] > found["prefill_start_s"]
    assert landed[-1]["at_s"] <= found["arrived_s"]
    assert landed[-1]["share"] == 1


def test_request_that_a_stop_string_ended_has_a_timeline_and_counts(
    pair: Pair, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 100, shift=7)
    text = pair.decoder.post(prompt, 48).json()["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    bytes_before = _received(pair)
    answer = pair.decoder.post(prompt, 48, stop=stop).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    found = pair.decoder.timeline(answer["id"])
    assert found["output_len"] >= answer["usage"]["completion_tokens"]
    assert found["output_len"] < 48
    assert found["transfer_bytes"] > 0
    assert found["finished_s"] >= found["first_token_s"]
    assert _received(pair) - bytes_before == found["transfer_bytes"]
    pair.decoder.wait_clean()


def _received(pair: Pair) -> float:
    page = pair.decoder.client.get(f"{pair.decoder.url.removesuffix('/v1')}/metrics").text
    [value] = re.findall(r"^pdx_transfer_bytes_total (\S+)$", page, re.MULTILINE)
    return float(value)


def test_transfers_are_told_of_while_they_run_and_after(
    pair: Pair, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 200, shift=11)
    rank = pair.prefiller.child("pdx.runner")
    os.kill(rank, signal.SIGSTOP)
    try:
        call = pair.decoder.call(prompt, 4)
        wait_until(lambda: _transfers(pair)["live"], timeout_s=5, what="the transfer is shown")
        [live] = _transfers(pair)["live"]
    finally:
        os.kill(rank, signal.SIGCONT)
    assert (live["state"], live["is_settled"], live["duration_s"]) == ("landing", False, None)
    assert (live["num_tokens"], live["provider"]) == (199, pair.provider)
    assert live["prefiller"] == pair.prefiller.address
    assert 0 == live["atoms_landed"] < live["atoms"]
    assert len(call.token_ids()) == 4
    done = _transfers(pair)["recent"][-1]
    assert (done["transfer_id"], done["state"]) == (live["transfer_id"], "landed")
    assert done["atoms_landed"] == done["atoms"] == live["atoms"]
    assert 0 < live["age_s"] < done["duration_s"] <= done["age_s"]
    pair.decoder.wait_clean()


def test_inspect_transfers_shows_a_transfer_whose_client_left(
    pair: Pair, tiny_prompt_ids: list[int]
) -> None:
    rank = pair.prefiller.child("pdx.runner")
    os.kill(rank, signal.SIGSTOP)
    try:
        call = pair.decoder.call(prompt_of(tiny_prompt_ids, 200, shift=13), 4)
        wait_until(lambda: _transfers(pair)["live"], timeout_s=5, what="the transfer is shown")
        call.leave()
        wait_until(
            lambda: _newest(pair)["state"] == "cancelled",
            timeout_s=5,
            what="the transfer is cancelled",
        )
    finally:
        os.kill(rank, signal.SIGCONT)
    pair.decoder.wait_clean()
    command = [sys.executable, "-m", "pdx", "inspect", "transfers", pair.decoder.url]
    text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    under_way, recent = text.split("the last ones\n")
    assert under_way == "under way\n  none\n\n"
    assert "cancelled" in recent.splitlines()[1]
    assert pair.prefiller.address in recent.splitlines()[1]
    told = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    assert json.loads(told)["recent"][-1]["state"] == "cancelled"


def _newest(pair: Pair) -> dict[str, Any]:
    """The last transfer, wherever it is: a cancelled one may be settled at once."""
    found = _transfers(pair)
    every: list[dict[str, Any]] = [*found["recent"], *found["live"]]
    return max(every, key=lambda view: view["transfer_id"])


def _transfers(pair: Pair) -> dict[str, Any]:
    answer = pair.decoder.client.get(f"{pair.decoder.url.removesuffix('/v1')}/pdx/transfers")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def test_trace_shows_requests_and_passes_also_of_a_killed_node(
    any_prefiller: Prefiller, tiny_prompt_ids: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    arguments = ["--kv-memory", "16M", "--trace", str(path)]
    log = tmp_path / "decode.log"
    with decoder(any_prefiller.address, log, *arguments) as node:
        node.complete(prompt_of(tiny_prompt_ids, 200, shift=17), LONG)
        # Later passes carry the first request's events out of the process.
        wait_until(
            lambda: node.complete([5], 8) and '"decode"' in path.read_text(),
            timeout_s=20,
            what="the request is in the trace",
        )
        node.kill()
    events = json.loads(path.read_text() + "]")
    names = [event["name"] for event in events if event["ph"] == "b"]
    assert names.count("prefill chunk") >= 4
    assert {"request", "queue", "transfer", "first step", "decode"} <= set(names)
    assert sum(event["ph"] == "X" for event in events) >= 24
