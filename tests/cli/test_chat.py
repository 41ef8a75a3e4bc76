"""`pdx chat` in a terminal and in a pipe, against a server that answers as it is told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from tests.cli.scripted_server import ScriptedServer, scripted_server
from tests.cli.terminal import ENV, Terminal, terminal


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


def chatting(*arguments: str) -> AbstractContextManager[Terminal]:
    return terminal("chat", *arguments)


def say(chat: Terminal, line: str) -> None:
    chat.expect("> ")
    chat.type(line + "\n")


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
        say(chat, "What is blue?")
        chat.expect("The sky.")
        say(chat, "Sure?")
        chat.expect("Yes.")
        say(chat, "/reset")
        chat.expect("a new conversation")
        say(chat, "And you?")
        chat.expect("Who?")
        chat.expect("> ")
        chat.type("\x04")  # Ctrl-D
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
        say(chat, "A story!")
        chat.expect("Once upon a time")
        chat.process.send_signal(signal.SIGINT)
        chat.expect("stopped; ")
        assert server.left.wait(timeout=10)
        say(chat, "Go on.")
        chat.expect("Fine.")
        say(chat, "/exit")
        assert chat.process.wait(timeout=10) == 0
    assert [turn["content"] for turn in server.bodies[1]["messages"]] == [
        "A story!",
        "Once upon a time",
        "Go on.",
    ]


def test_a_failed_question_is_shown_and_forgotten(server: ScriptedServer) -> None:
    server.scripts = [(503, {"error": {"message": "full", "type": "x"}}), ["Here."]]
    with chatting(server.url) as chat:
        say(chat, "Anyone?")
        chat.expect("error: the server answered 503: full")
        say(chat, "Again?")
        chat.expect("Here.")
    assert [turn["content"] for turn in server.bodies[1]["messages"]] == ["Again?"]


def test_answers_longer_than_the_screen_come_whole(server: ScriptedServer) -> None:
    server.scripts = [[f"line {i}\n\n" for i in range(60)]]
    with chatting(server.url) as chat:
        say(chat, "Count.")
        said = chat.expect("all in ")
        say(chat, "/exit")
        assert chat.process.wait(timeout=10) == 0
    shown = [int(number) for number in re.findall(r"line (\d+)", said)]
    assert shown[-60:] == list(range(60))
