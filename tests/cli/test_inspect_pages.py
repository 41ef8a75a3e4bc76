"""`pdx inspect pages`: in a pipe, as JSON, and on a terminal with `--watch`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from pdx.metrics.node import Health
from tests.cli.scripted_server import ScriptedServer, scripted_server
from tests.cli.terminal import terminal

PATH = "/health"


def page(quarantined: int) -> bytes:
    counts = {
        "pages_free": 60,
        "pages_quarantined": quarantined,
        "pages_cached": 4,
        "requests_waiting": 3,
        "requests_active": 0,
        "faults_no_beat": 9,
    }
    return msgspec.json.encode(Health(status="ok", detail="ready", streams=1, counts=counts))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        running.pages[PATH] = page(36)
        yield running


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdx", "inspect", "pages", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_pages_are_told_by_state_for_a_control_address_too(server: ScriptedServer) -> None:
    found = run(server.url.removeprefix("http://").removesuffix("/v1"))
    assert found.returncode == 0, found.stderr
    [quarantined] = [line for line in found.stdout.splitlines() if "quarantined" in line]
    assert quarantined.split()[1:3] == ["36", "36%"]
    assert "100 pages; requests: 3 waiting, 0 active" in found.stdout
    assert "faults_no_beat" not in found.stdout


def test_json_is_what_the_node_says(server: ScriptedServer) -> None:
    assert json.loads(run(server.url, "--json").stdout) == json.loads(page(36))


def test_what_is_no_node_is_named() -> None:
    found = run("127.0.0.1:9")
    assert found.returncode == 1
    assert "error: no answer from http://127.0.0.1:9" in found.stderr


def test_watch_follows_pages(server: ScriptedServer) -> None:
    with terminal("inspect", "pages", server.url, "--watch") as screen:
        screen.expect("36%")
        server.pages[PATH] = page(0)
        screen.expect("0%")
