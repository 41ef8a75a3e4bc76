"""`pdx inspect transfers` on a terminal: what `--watch` shows, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pdx.metrics.transfers import RankProgress, Sends, SendView, Transfers, TransferView
from tests.cli.scripted_server import ScriptedServer, scripted_server
from tests.cli.terminal import ENV, terminal

PATH = "/pdx/transfers"


def view(transfer_id: int, **changes: Any) -> TransferView:
    fields: dict[str, Any] = {
        "transfer_id": transfer_id,
        "state": "landing",
        "is_settled": False,
        "prefiller": "10.0.0.1:7000",
        "provider": "tcp",
        "num_tokens": 2000,
        "num_bytes": 92 << 20,
        "atoms": 400,
        "atoms_landed": 100,
        "age_s": 0.25,
    }
    return TransferView(**(fields | changes))


def page(live: list[TransferView], recent: list[TransferView]) -> bytes:
    return msgspec.json.encode(Transfers(live=live, recent=recent))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        running.pages[PATH] = page([view(4711)], [])
        yield running


def test_watch_follows_transfers_until_ctrl_c(server: ScriptedServer) -> None:
    with terminal("inspect", "transfers", server.url, "--watch") as screen:
        screen.expect("under way")
        screen.expect("4711")
        screen.expect("landing")
        screen.expect("25%")
        landed = view(4711, state="landed", is_settled=True, atoms_landed=400, duration_s=0.5)
        server.pages[PATH] = page([], [landed])
        screen.expect("the last ones")
        screen.expect("landed")
        screen.expect("100%")
        screen.expect("500.0 ms")
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(timeout=10) == 0


def test_watch_ends_with_the_nodes_own_end(server: ScriptedServer) -> None:
    with terminal("inspect", "transfers", server.url, "--watch") as screen:
        screen.expect("4711")
        del server.pages[PATH]
        screen.expect("error: ")
        screen.expect("tells of no transfers")
        assert screen.process.wait(timeout=10) == 1


def test_watch_needs_a_terminal(server: ScriptedServer) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pdx", "inspect", "transfers", server.url, "--watch"],
        env=os.environ | ENV,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "error: --watch draws on a terminal\n\nhint: leave it out to print once\n"
    )


def test_a_prefillers_are_told_with_the_layer_that_it_is_at(server: ScriptedServer) -> None:
    going_out = SendView(
        transfer_id=17,
        state="open",
        decoder="10.0.0.2:40000",
        provider="tcp",
        num_tokens=2000,
        num_armed=500,
        atoms=400,
    )
    ranks = [RankProgress(pass_idx=9, layers_done=3, num_layers=30)]
    server.pages[PATH] = msgspec.json.encode(Sends(ranks=ranks, live=[going_out]))
    run = subprocess.run(
        [sys.executable, "-m", "pdx", "inspect", "transfers", server.url],
        env=os.environ | ENV,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert "going out; layer 3 of 30 of pass 9" in run.stdout
    [row] = [line.split() for line in run.stdout.splitlines() if line.split()[:1] == ["17"]]
    assert row == ["17", "open", "25%", "2000", "400", "10.0.0.2:40000", "tcp"]
