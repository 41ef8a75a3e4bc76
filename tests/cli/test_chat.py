"""`pdx chat` in a terminal and in a pipe, against a server that answers as it is told."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cli.scripted_server import ScriptedServer, scripted_server

ENV = {"COLUMNS": "80", "LINES": "24", "TERM": "xterm", "NO_COLOR": "1"}
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


class Terminal:
    """A chat on a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self._fd = fd
        self._seen = ""
        self._place = 0

    def expect(self, text: str) -> str:
        """Wait for text after what was expected before; returns what came with it."""
        deadline = time.monotonic() + 20
        while (at := self._seen.find(text, self._place)) < 0:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._fd], [], [], max(left, 0))
            assert ready, f"no {text!r} in {self._seen[self._place :]!r}"
            self._read()
        before, self._place = self._seen[self._place : at], at + len(text)
        return before

    def say(self, line: str) -> None:
        self.expect("> ")
        os.write(self._fd, line.encode() + b"\n")

    def press_ctrl_d(self) -> None:
        self.expect("> ")
        os.write(self._fd, b"\x04")

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 4096)
        except OSError as error:  # the other side is closed
            raise AssertionError(f"the chat ended: {self._seen!r}") from error
        self._seen += CONTROL.sub("", data.decode(errors="replace"))


@contextmanager
def chatting(*arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pdx", "chat", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | ENV,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def piped(*arguments: str, stdin: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdx", "chat", *arguments],
        input=stdin,
        env=os.environ | ENV,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def test_a_piped_question_gets_its_answer_on_stdout_and_nothing_else(
    server: ScriptedServer,
) -> None:
    server.scripts = [["Blue", ", ", "mostly."]]
    options = ["--system", "Be short.", "--max-tokens", "9", "--temperature", "0"]
    run = piped(server.url, *options, "--api-key", "sesame", stdin="What colour?\n")
    assert (run.returncode, run.stdout, run.stderr) == (0, "Blue, mostly.\n", "")
    assert server.keys == ["Bearer sesame"]
    assert server.bodies == [
        {
            "model": "scripted",
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "What colour?"},
            ],
            "stream": True,
            "max_tokens": 9,
            "temperature": 0.0,
        }
    ]


def test_a_refused_question_ends_with_the_servers_words(server: ScriptedServer) -> None:
    server.scripts = [(400, {"error": {"message": "too long", "type": "invalid_request_error"}})]
    run = piped(server.url, stdin="hello")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == "error: the server answered 400: too long\n"


def test_a_terminal_keeps_the_conversation_until_it_is_reset(server: ScriptedServer) -> None:
    server.scripts = [["The *sky*."], ["Yes."], ["Who?"]]
    with chatting(server.url, "--model", "mine") as chat:
        chat.expect("mine at ")
        chat.say("What is blue?")
        chat.expect("The sky.")
        chat.say("Sure?")
        chat.expect("Yes.")
        chat.say("/reset")
        chat.expect("a new conversation")
        chat.say("And you?")
        chat.expect("Who?")
        chat.press_ctrl_d()
        assert chat.process.wait(timeout=10) == 0
    asked = [[turn["content"] for turn in body["messages"]] for body in server.bodies]
    assert asked == [
        ["What is blue?"],
        ["What is blue?", "The *sky*.", "Sure?"],
        ["And you?"],
    ]
    assert {body["model"] for body in server.bodies} == {"mine"}


def test_ctrl_c_stops_an_answer_and_what_had_come_is_remembered(server: ScriptedServer) -> None:
    server.scripts = [["Once upon a time", server.HOLD], ["Fine."]]
    with chatting(server.url) as chat:
        chat.say("A story!")
        chat.expect("Once upon a time")
        chat.process.send_signal(signal.SIGINT)
        chat.expect("stopped; ")
        assert server.left.wait(timeout=10)
        chat.say("Go on.")
        chat.expect("Fine.")
        chat.say("/exit")
        assert chat.process.wait(timeout=10) == 0
    assert [turn["content"] for turn in server.bodies[1]["messages"]] == [
        "A story!",
        "Once upon a time",
        "Go on.",
    ]


def test_a_failed_question_is_shown_and_forgotten(server: ScriptedServer) -> None:
    server.scripts = [(503, {"error": {"message": "full", "type": "x"}}), ["Here."]]
    with chatting(server.url) as chat:
        chat.say("Anyone?")
        chat.expect("error: the server answered 503: full")
        chat.say("Again?")
        chat.expect("Here.")
    assert [turn["content"] for turn in server.bodies[1]["messages"]] == ["Again?"]


def test_answers_longer_than_the_screen_come_whole(server: ScriptedServer) -> None:
    server.scripts = [[f"line {i}\n\n" for i in range(60)]]
    with chatting(server.url) as chat:
        chat.say("Count.")
        said = chat.expect("all in ")
        chat.say("/exit")
        assert chat.process.wait(timeout=10) == 0
    shown = [int(number) for number in re.findall(r"line (\d+)", said)]
    assert shown[-60:] == list(range(60))
