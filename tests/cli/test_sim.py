"""`pdx sim`: what it prints, and what becomes of a seed that fails."""

from __future__ import annotations

import json
import logging

import pytest

from pdx.cli.main import main
from tests.lab.sim.mutations import MUTATIONS


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command, run in this process."""
    handlers, level = list(logging.root.handlers), logging.root.level
    monkeypatch.setattr("sys.argv", command.split())
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    return int(ended.value.code or 0)


def test_a_history_is_told_and_summed_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("pdx sim --seed 1 --requests 3 --faults none", monkeypatch) == 0
    told = capsys.readouterr().out
    assert "r2       asks d0" in told
    assert "requests   3 finished" in told
    assert "invariants all hold" in told


def test_json_is_an_object_for_each_history(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("pdx sim --histories 2 --requests 2 --json", monkeypatch) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["seed"], each["broken"]) for each in told] == [(0, None), (1, None)]


def test_a_broken_invariant_is_named_and_shrunk_to_a_command_that_breaks_it_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    MUTATIONS["unpin_a_source_early"](monkeypatch)
    assert run("pdx sim --seed 0", monkeypatch) == 1
    told = capsys.readouterr()
    assert "invariants BROKEN: live-source" in told.out
    command = told.err.splitlines()[-1].removeprefix("to see it happen: ")
    assert command.endswith("--only-faults none"), "it needs no fault"
    assert run(command, monkeypatch) == 1
    assert "1 open" in capsys.readouterr().out, "one request is enough"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [("--nodes 2", "'2'"), ("--faults kill,fire", "'fire'"), ("--only-faults x", "'x'")],
)
def test_what_is_no_scenario_is_refused(
    arguments: str,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(f"pdx sim {arguments}", monkeypatch) == 2
    assert named in capsys.readouterr().err
