"""Our own clients against real nodes: `pdx chat` and `pdx bench serve`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.system.conftest import Pair
from tests.system.nodes import wait_until

SMALL = ["--prompt-mean", "30", "--output-mean", "6", "--prompt-sigma", "0.5"]


def pdx(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdx", *arguments],
        input=stdin,
        env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


def bench(*arguments: str) -> dict[str, Any]:
    run = pdx("bench", "serve", *arguments, *SMALL, "--json")
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_a_piped_chat_prints_what_the_api_answers(pair: Pair) -> None:
    url = pair.decoder.url
    body = {
        "messages": [{"role": "user", "content": "Who keeps the lamp?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    answer = pair.decoder.client.post(f"{url}/chat/completions", json=body).json()
    options = ["--max-tokens", "12", "--temperature", "0"]
    run = pdx("chat", url, *options, stdin="Who keeps the lamp?\n")
    assert run.returncode == 0, run.stderr
    assert run.stdout == answer["choices"][0]["message"]["content"] + "\n"


def test_an_open_loop_sends_all_and_measures_what_came(pair: Pair, tmp_path: Path) -> None:
    plot = tmp_path / "times.svg"
    found = bench(pair.decoder.url, "--rate", "30", "--requests", "20", "--plot", str(plot))
    [[figures]] = found["rounds"]
    assert (figures["requests"], figures["completed"], figures["errors"]) == (20, 20, {})
    assert figures["output_tokens"] > 20
    for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s"):
        assert 0 < figures[name]["p50"] <= figures[name]["p90"] <= figures[name]["p99"] < 30
    assert figures["ttft_s"]["p50"] <= figures["e2e_s"]["p50"]
    ElementTree.fromstring(plot.read_text())
    pair.decoder.wait_clean()


def test_two_servers_are_compared_round_by_round_on_the_same_load(pair: Pair) -> None:
    url = pair.decoder.url
    options = ["--concurrency", "2", "--requests", "6", "--rounds", "2"]
    found = bench(url, url.replace("127.0.0.1", "localhost"), *options)
    assert len(found["rounds"]) == len(found["ratios"]) == 2
    for first, second in found["rounds"]:
        for name in ("completed", "prompt_tokens", "output_tokens"):
            assert first[name] == second[name]
        assert first["completed"] == 6
    pair.decoder.wait_clean()


def test_failures_are_counted_by_kind_and_a_table_names_them(pair: Pair) -> None:
    over = ["--concurrency", "2", "--requests", "6", "--context", "2000", "--output-sigma", "0"]
    lengths = ["--prompt-mean", "500", "--prompt-sigma", "0.5", "--output-mean", "20"]
    run = pdx("bench", "serve", pair.decoder.url, *over, *lengths)
    assert run.returncode == 0, run.stderr
    # Where the table's lines are broken depends on the port's digits, among others.
    assert "x http_400:invalid_request_error" in " ".join(run.stdout.split())
    assert "first token" in run.stdout
    pair.decoder.wait_clean()


def test_what_cannot_be_measured_is_said_before_the_load(pair: Pair) -> None:
    run = pdx("bench", "serve", pair.decoder.url, "--token-ids", "600-700")
    assert run.returncode == 1
    assert run.stdout == ""
    assert "error: " in run.stderr
    assert "token id 600" in run.stderr
    assert "hint: the server must take token ids" in run.stderr


def test_an_interrupted_bench_exits_with_130_and_leaves_no_request_behind(pair: Pair) -> None:
    arguments = ["--concurrency", "2", "--duration", "60", *SMALL]
    finished = pair.decoder.counts()["finished"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pdx", "bench", "serve", pair.decoder.url, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(
            lambda: pair.decoder.counts()["finished"] > finished + 4,
            timeout_s=20,
            what="the load runs",
        )
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (130, "", "")
    pair.decoder.wait_clean()
