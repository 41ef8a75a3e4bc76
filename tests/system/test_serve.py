"""`pdx serve`: nodes under one supervisor, and one colocated node."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.cli.terminal import terminal
from tests.system.conftest import Generate
from tests.system.nodes import (
    Decoder,
    Node,
    end,
    is_alive,
    read_announcement,
    run_to_end,
    start,
    wait_until,
)
from tests.system.prompts import prompt_of

KV = ["--kv-memory", "16M"]
URL = r"http://\S+/v1"


@contextmanager
def serving(model: Path, log: Path, *arguments: str, **env: str) -> Iterator[Decoder]:
    """A `pdx serve` whose (first) API is open."""
    node = start(["serve", str(model), *KV, *arguments], log, env)
    try:
        url = read_announcement(node, URL)
        with httpx.Client(timeout=60) as client:
            yield Decoder(node.process, node.log, url, client)
    finally:
        end(node)


def pid_of(served: Node, command: str) -> int:
    """The node that runs `pdx COMMAND`."""
    [pid] = [
        pid
        for pid in served.family()
        if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2:4] == [b"pdx", command.encode()]
    ]
    return pid


def children_of(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def decoder_of(served: Node, url: str) -> int:
    """The decode node whose frontend listens there."""
    port = f"{urlsplit(url).port:04X}"
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    [inode] = [row[9] for row in rows if row[1].endswith(f":{port}") and row[3] == "0A"]
    [frontend] = [
        pid
        for pid in served.family()
        if any(
            str(fd.readlink()) == f"socket:[{inode}]" for fd in Path(f"/proc/{pid}/fd").iterdir()
        )
    ]
    return int(Path(f"/proc/{frontend}/stat").read_text().rpartition(")")[2].split()[1])


def wait_said(served: Node, text: str) -> None:
    wait_until(lambda: text in served.stderr(), timeout_s=30, what=f"it says {text!r}")


def copy_of(model: Path, folder: Path) -> Path:
    """A model that the test may take away."""
    return Path(shutil.copytree(model, folder / "model"))


def is_idle(served: Decoder) -> bool:
    """No page and no request is held."""
    counts = served.counts()
    return counts["pages_free"] > 0 and not any(
        counts[name]
        for name in ("pages_leased", "pages_filled", "requests_waiting", "requests_active")
    )


def traced(file: Path) -> set[str]:
    """Names of what a trace shows of requests."""
    return {event["name"] for event in json.loads(file.read_text()) if event["ph"] == "b"}


def test_one_command_serves_the_colocated_tokens_and_ctrl_c_ends_all_in_order(
    tiny_llama: Path, tmp_path: Path, colocated: Generate, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 100)
    trace = ["--trace", str(tmp_path / "trace.json")]
    with serving(tiny_llama, tmp_path / "log", "--decode", "2", *trace) as served:
        family = served.family()
        first, second = served.url, read_announcement(served, URL)
        assert second != served.url
        assert served.complete(prompt, 24) == colocated(prompt, 24)
        served.announced = second
        assert served.complete(prompt, 24) == colocated(prompt, 24)
        assert served.stop() == 0
        assert not any(map(is_alive, family))
        said = served.stderr()
    for name in ("prefill", "decode-1", "decode-2"):
        assert re.search(rf"^\[{name}\] ([\d.]+) of \1 MiB of weights loaded, \d+ s$", said, re.M)
    assert f"{tiny_llama} is served at {first} and {second}; Ctrl-C stops it" in said
    assert "[prefill] serving " in said
    assert "[decode-2] connected to " in said
    # Decoders say goodbye while their prefiller still listens.
    heard = [line for line in said.splitlines() if line.startswith("[prefill]")]
    assert sum("the decoder shuts down" in line for line in heard) == 2
    assert "Traceback" not in said
    for i in (1, 2):  # a file for each node, with its one request
        assert traced(tmp_path / f"trace-decode-{i}.json") >= {"request", "transfer", "decode"}


@pytest.mark.parametrize("command", ["prefill", "decode"])
def test_without_restarts_a_crashed_node_is_named_and_the_others_are_stopped(
    tiny_llama: Path, tmp_path: Path, command: str
) -> None:
    with serving(tiny_llama, tmp_path / "log", "--restarts", "0") as served:
        family = served.family()
        os.kill(pid_of(served, command), signal.SIGKILL)
        assert served.process.wait(timeout=15) == 1
        wait_until(lambda: not any(map(is_alive, family)), timeout_s=5, what=f"{family} end")
        said = served.stderr()
    last = said[said.index("error: ") :]
    assert f"error: the {command} node (pid " in last
    assert "was killed by SIGKILL; its last lines:" in last
    assert {"prefill": "serving ", "decode": "connected to "}[command] in last


def test_a_killed_node_comes_back_at_its_address_while_the_others_serve(
    tiny_llama: Path, tmp_path: Path, colocated: Generate, tiny_prompt_ids: list[int]
) -> None:
    """Also one whose rank is stopped, which cannot notice the end of its node by itself."""
    prompt = prompt_of(tiny_prompt_ids, 100)
    expected = colocated(prompt, 24)
    with serving(tiny_llama, tmp_path / "log", "--decode", "2") as served:
        url, second = served.url, read_announcement(served, URL)
        begun = served.call(prompt_of(tiny_prompt_ids, 40), 300, stream=True)
        assert begun.wait_head() == 200
        first_prefiller = pid_of(served, "prefill")
        [rank] = children_of(first_prefiller)
        os.kill(rank, signal.SIGSTOP)
        os.kill(first_prefiller, signal.SIGKILL)
        assert served.complete(prompt, 24) == expected, "the decoder prefills by itself"
        assert len(begun.token_ids()) == 300
        wait_said(served, "the prefill node was killed by SIGKILL; it is started again in 0.5 s")
        wait_said(served, "the prefill node serves again")
        assert not is_alive(rank)
        served.wait_healthy()
        num_here = served.counts()["prefills_here"]
        assert served.complete(prompt, 24) == expected
        assert served.counts()["prefills_here"] == num_here, "the prefiller that came back did it"

        os.kill(decoder_of(served, url), signal.SIGKILL)
        served.announced = second
        assert served.complete(prompt, 24) == expected, "the other decoder goes on"
        wait_said(served, "the decode-1 node serves again")
        served.announced = url
        assert served.complete(prompt, 24) == expected
        assert served.health()["status"] == "ok"
        family = served.family()
        assert served.stop() == 0
        assert not any(map(is_alive, family))
        assert "Traceback" not in served.stderr()


def test_a_node_that_ends_each_time_ends_serve_with_its_last_words(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Its model is gone."""
    model = copy_of(tiny_llama, tmp_path)
    with serving(model, tmp_path / "log", "--restarts", "1") as served:
        family = served.family()
        model.rename(tmp_path / "gone")
        os.kill(pid_of(served, "prefill"), signal.SIGKILL)
        assert served.process.wait(timeout=30) == 1
        wait_until(lambda: not any(map(is_alive, family)), timeout_s=5, what=f"{family} end")
        said = served.stderr()
    last = said[said.index("error: the prefill node (pid ") :]
    assert ", restarted once, exited with code 2; its last lines:" in last
    assert "is neither a folder nor" in last


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_pause_before_a_restart_holds_up_no_end(
    tiny_llama: Path, tmp_path: Path, number: int
) -> None:
    model = copy_of(tiny_llama, tmp_path)
    with serving(model, tmp_path / "log") as served:
        family = served.family()
        model.rename(tmp_path / "gone")
        os.kill(pid_of(served, "prefill"), signal.SIGKILL)
        wait_said(served, "it is started again in 2 s")
        served.signal(number)
        assert served.process.wait(timeout=1.8) == 0, "before the pause is over"
        assert not any(map(is_alive, family))
        assert "Traceback" not in served.stderr()


def test_a_terminal_shows_bars_while_nodes_load_and_then_one_line(tiny_llama: Path) -> None:
    with terminal("serve", str(tiny_llama), *KV, PDX_THREADS="1", PDX_DTYPE="float32") as screen:
        screen.expect("prefill starts")
        screen.expect("[prefill] serving ")
        screen.expect("prefill serves")
        screen.expect("decode starts")
        bars = screen.expect(f"{tiny_llama.name} is served at http://127.0.0.1:")
        assert "MiB" in bars
        assert "Ctrl-C stops it" not in bars
        screen.process.send_signal(signal.SIGINT)
        rest = screen.expect("stopping;")
        assert "http://" not in rest, "the URL is shown once"
        assert screen.process.wait(timeout=15) == 0


def test_nodes_end_with_a_supervisor_that_is_killed(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(tiny_llama, tmp_path / "log") as served:
        family = served.family()
        served.process.kill()
        served.process.wait(timeout=10)
        wait_until(lambda: not any(map(is_alive, family)), timeout_s=10, what=f"{family} end")


def test_a_node_that_cannot_start_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    node = start(["serve", str(tiny_llama), "--device", "cuda:999", *KV], tmp_path / "log")
    try:
        assert node.process.wait(timeout=60) == 1
    finally:
        end(node)
    assert "error: the prefill node (pid " in node.stderr()
    assert "cuda:999" in node.stderr()


def test_settings_reach_the_nodes_and_the_key_is_asked_for_but_never_shown(
    tiny_llama: Path, tmp_path: Path, tiny_prompt_ids: list[int]
) -> None:
    """On SIGTERM all nodes finish what runs."""
    file = tmp_path / "pdx.toml"
    file.write_text('[server]\nserved_model_name = "tiny"\n[output]\nlog_format = "json"\n')
    arguments = ["--config", str(file)]
    with serving(tiny_llama, tmp_path / "log", *arguments, PDX_API_KEY="sesame") as served:
        models = f"{served.url}/models"
        assert served.client.get(models).status_code == 401
        key = {"authorization": "Bearer sesame"}
        answer = served.client.get(models, headers=key)
        assert answer.json()["data"][0]["id"] == "tiny"
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in served.family()]
        call = served.call(prompt_of(tiny_prompt_ids, 40), 400, key, stream=True)
        assert call.wait_head() == 200
        served.signal(signal.SIGTERM)
        assert len(call.token_ids()) == 400
        assert served.process.wait(timeout=15) == 0
        said = served.stderr().splitlines()
    assert [line for line in said if not line.startswith("{")] == []
    lines = [json.loads(line) for line in said]
    assert not any(b"sesame" in command for command in commands)
    assert {"serve", "prefill", "decode"} <= {line["role"] for line in lines}
    assert not any("sesame" in line["message"] for line in lines)


def test_one_colocated_node_gives_the_same_tokens(
    tiny_llama: Path, tmp_path: Path, colocated: Generate, tiny_prompt_ids: list[int]
) -> None:
    trace = tmp_path / "trace.json"
    arguments = ["--colocated", "--trace", str(trace), "--http", "0.0.0.0:0"]
    with serving(tiny_llama, tmp_path / "log", *arguments) as served:
        assert served.url.startswith("http://127.0.0.1:"), "an address to open, not to listen on"
        assert f"{tiny_llama} is served at {served.url}; Ctrl-C stops it" in served.stderr()
        for length in (1, 2, 16, 17, 64, 65, 200):
            prompt = prompt_of(tiny_prompt_ids, length)
            assert served.complete(prompt, 24) == colocated(prompt, 24)
        assert served.health()["status"] == "ok"
        answer = served.post(prompt_of(tiny_prompt_ids, 40), 4).json()
        assert served.timeline(answer["id"])["prefiller"] is None
        wait_until(lambda: is_idle(served), timeout_s=5, what="the node is clean")
        family = served.family()
        assert len(family) == 3
        assert served.stop() == 0
        assert not any(map(is_alive, family))
    assert traced(trace) >= {"request", "prefill chunk", "decode"}


def test_a_client_that_leaves_a_colocated_node_frees_its_pages(
    tiny_llama: Path, tmp_path: Path, tiny_prompt_ids: list[int]
) -> None:
    """One that stays holds up the end, until a second SIGTERM."""
    with serving(tiny_llama, tmp_path / "log", "--colocated") as served:
        call = served.call(prompt_of(tiny_prompt_ids, 40), 400, stream=True)
        assert call.wait_head() == 200
        call.leave()
        served.wait_count("aborted", 1)
        wait_until(lambda: is_idle(served), timeout_s=5, what="the node is clean")

        call = served.call(prompt_of(tiny_prompt_ids, 40), 400, stream=True)
        assert call.wait_head() == 200
        served.signal_child("pdx.runner", signal.SIGSTOP)
        served.signal(signal.SIGTERM)
        wait_until(
            lambda: served.health()["detail"] == "draining",
            timeout_s=5,
            what="it says that it ends",
        )
        served.signal(signal.SIGTERM)
        assert served.process.wait(timeout=10) == 0
        call.leave()
        assert "Traceback" not in served.stderr()


def test_a_second_ctrl_c_ends_a_node_that_does_not_stop(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(tiny_llama, tmp_path / "log") as served:
        family = served.family()
        stuck = pid_of(served, "decode")
        os.kill(stuck, signal.SIGSTOP)
        served.signal(signal.SIGINT)
        wait_until(lambda: "stopping" in served.stderr(), timeout_s=5, what="it says that it stops")
        assert served.process.poll() is None
        served.signal(signal.SIGINT)
        assert served.process.wait(timeout=5) == 0
        wait_until(lambda: not any(map(is_alive, family)), timeout_s=5, what=f"{family} end")


@pytest.mark.parametrize("command", ["serve", "colocated", "decode"])
def test_a_taken_port_is_said_before_a_node_starts(
    command: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """Before the model is loaded, and before a prefiller is waited for, which is not there."""
    words = {
        "serve": ["serve", str(tiny_llama)],
        "colocated": ["serve", "--colocated", str(tiny_llama)],
        "decode": ["decode", "--peer", "127.0.0.1:1"],
    }
    with socket.create_server(("127.0.0.1", 0)) as taken:
        http = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = [*words[command], "--http", http]
        code, _, said = run_to_end(arguments, tmp_path / "log", timeout_s=20)
    assert code == 1
    assert "the address is already in use" in said
    assert not re.search(r"loaded|waiting|\[prefill\]", said), said
