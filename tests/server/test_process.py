"""The frontend as a process: start, addresses, signals, end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdx.request.frames import encode_frame
from pdx.request.stream import FrontendFailed, FrontendReady, StepFrame, Submit

if TYPE_CHECKING:
    from conftest import Frontend

Start = Callable[..., "Frontend"]
COMPLETIONS = "/v1/completions"


def test_frontend_imports_no_torch() -> None:
    code = "import pdx.server.__main__, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost", "0.0.0.0", ""])
def test_frontend_listens_where_it_says(start: Start, host: str) -> None:
    frontend = start(host=host)
    assert isinstance(frontend.first, FrontendReady)
    assert frontend.first.port != 0
    assert httpx.get(frontend.url + "/v1/models").status_code == 200
    if host == "":
        for loopback in ("127.0.0.1", "[::1]"):
            url = f"http://{loopback}:{frontend.first.port}/v1/models"
            assert httpx.get(url).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", ""])
def test_address_in_use_is_named(start: Start, host: str) -> None:
    first = start(host=host)
    second = start(host=host, port=first.first.port)
    assert isinstance(second.first, FrontendFailed)
    assert second.first.kind == "ConfigError"
    assert "already in use" in second.first.message
    assert str(first.first.port) in second.first.message
    assert second.process.wait(10) == 1


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("203.0.113.1", 0, "no such address"),
        ("no-such-name.invalid", 0, "no-such-name.invalid"),
        ("127.0.0.1", 70_000, "70000"),
    ],
)
def test_address_that_is_not_here_is_named(start: Start, host: str, port: int, words: str) -> None:
    failed = start(host=host, port=port).first
    assert isinstance(failed, FrontendFailed)
    assert failed.kind == "ConfigError"
    assert words in failed.message


def test_folder_without_a_tokenizer_is_named(start: Start, tmp_path: Path) -> None:
    failed = start(folder=tmp_path).first
    assert isinstance(failed, FrontendFailed)
    assert failed.kind == "CheckpointError"
    assert str(tmp_path / "tokenizer.json") in failed.message


def test_damaged_generation_config_is_named(start: Start, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": "x"}')
    failed = start(folder=tmp_path).first
    assert isinstance(failed, FrontendFailed)
    assert "generation_config.json" in failed.message


def test_model_without_a_chat_template_serves_completions_only(
    start: Start, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    frontend = start(folder=tmp_path)
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    response = httpx.post(frontend.url + "/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


def test_interrupt_is_the_primarys_business(start: Start) -> None:
    frontend = start()
    frontend.process.send_signal(signal.SIGINT)
    assert httpx.get(frontend.url + "/v1/models").status_code == 200
    assert frontend.stop() == 0


def test_frontend_ends_when_the_socket_closes(start: Start) -> None:
    assert start().stop() == 0


def test_frontend_ends_when_no_configuration_comes() -> None:
    ours, theirs = socket.socketpair()
    args = [sys.executable, "-m", "pdx.server", "--fd", str(theirs.fileno())]
    process = subprocess.Popen(args, pass_fds=[theirs.fileno()])
    theirs.close()
    ours.close()
    assert process.wait(20) == 0


def test_nonsense_from_the_primary_ends_the_frontend(start: Start) -> None:
    frontend = start()
    frontend.sock.sendall(b"\x02\x00\x00\x00\xc1\xc1")
    assert frontend.process.wait(15) == 1


@pytest.mark.parametrize("how", ["socket", "SIGTERM"])
def test_waiting_clients_get_a_503_when_the_primary_is_gone(
    start: Start, make_update: Callable[..., StepFrame], how: str
) -> None:
    frontend = start()

    def post(stream: bool) -> httpx.Response:
        body = {"prompt": "Hi", "stream": stream}
        return httpx.post(frontend.url + COMPLETIONS, json=body, timeout=20)

    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(post, True)
        frontend.send(make_update(frontend.next(Submit).stream_id, [70]))
        waiting = [pool.submit(post, stream) for stream in (False, True)]
        for _ in waiting:
            frontend.next(Submit)
        if how == "SIGTERM":
            frontend.process.send_signal(signal.SIGTERM)
            assert frontend.process.wait(15) == 0
        else:
            assert frontend.stop() == 0
        for answer in waiting:
            assert answer.result().status_code == 503
            assert answer.result().json()["error"]["type"] == "worker_error"
        assert running.result().status_code == 200
        assert "worker_error" in running.result().text
        assert "[DONE]" not in running.result().text


def test_frontend_does_not_outlive_a_killed_parent(folder: Path, shared_frontend: Any) -> None:
    """Not even where someone keeps the other end of its socket open."""
    ours, theirs = socket.socketpair()
    code = (
        "import subprocess, sys;"
        "args = [sys.executable, '-m', 'pdx.server', '--fd', sys.argv[1]];"
        "subprocess.run(args, pass_fds=[int(sys.argv[1])])"
    )
    args = [sys.executable, "-c", code, str(theirs.fileno())]
    parent = subprocess.Popen(args, pass_fds=[theirs.fileno()])
    theirs.close()
    ours.sendall(encode_frame(shared_frontend.config))
    ours.settimeout(20)
    assert ours.recv(1)  # it is ready
    parent.kill()
    parent.wait()
    while ours.recv(4096):  # ends when the last holder of the other end is gone
        pass
    ours.close()


def test_text_whose_tokens_the_model_does_not_have_is_refused(start: Start) -> None:
    """The rank would end at such an id."""
    frontend = start(vocab_size=1, eos_token_ids=())
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in ((COMPLETIONS, {"prompt": "Hi"}), ("/v1/chat/completions", chat)):
        answer = httpx.post(frontend.url + path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == next(iter(body))
        assert "outside the vocabulary of 1" in answer.json()["error"]["message"]
    assert frontend.messages.empty()
