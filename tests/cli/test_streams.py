"""What becomes of a command whose output cannot be written: it says so and exits with 1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdx.errors import OutputError
from pdx.metrics.trace import TraceWriter

PDX = f"{sys.executable} -m pdx"
FULL = "error: cannot write to stdout: No space left on device\n"
#: One of each way that commands print.
COMMANDS = [
    "--version",
    "--help",
    "serve --help",
    "prefill --print-config",
    "inspect topology",
    "inspect topology --json",
    "inspect fabric",
    "inspect fabric --json",
    "bench kernels --offline --only decode",
    "bench kernels --offline --only decode --json",
    "sim --requests 2",
    "sim --requests 2 --json",
]


def in_shell(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script],
        env=os.environ | {"PYTHONUNBUFFERED": ""} | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_named(command: str) -> None:
    run = in_shell(f"{PDX} {command} > /dev/full")
    assert (run.returncode, run.stderr) == (1, FULL)


@pytest.mark.parametrize("command", ["--help", "inspect topology --json"])
def test_a_closed_stdout_is_named(command: str) -> None:
    run = in_shell(f"{PDX} {command} >&-")
    assert (run.returncode, run.stderr) == (1, "error: cannot write to stdout: it is closed\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["--help", "inspect topology", "sim --requests 2"])
def test_a_reader_that_takes_nothing_ends_a_command_quietly(command: str, unbuffered: str) -> None:
    script = f"{PDX} {command} | true; exit ${{PIPESTATUS[0]}}"
    run = in_shell(script, PYTHONUNBUFFERED=unbuffered)
    # It may also be done before the reader has left.
    assert (run.returncode in (0, 1), run.stderr) == (True, "")


@pytest.mark.parametrize("place", ["2>/dev/full", "2>&-"])
def test_a_lost_stderr_changes_nothing_else(place: str) -> None:
    assert in_shell(f"{PDX} decode --frob {place}").returncode == 2
    run = in_shell(f"{PDX} --version <&- {place}")
    assert (run.returncode, run.stdout[:4], run.stderr) == (0, "pdx ", "")


def test_an_error_stays_the_error_where_stdout_is_lost_too() -> None:
    run = in_shell(f"{PDX} sim --nodes 2 > /dev/full")
    assert run.returncode == 2
    assert run.stderr.startswith("error: --nodes '2' is no number of nodes")


def test_json_lines_tell_of_a_full_disk_too() -> None:
    run = in_shell(f"{PDX} sim --requests 2 --log-format json > /dev/full")
    assert run.returncode == 1
    assert '"message": "cannot write to stdout: No space left on device"' in run.stderr


def test_what_generates_is_stopped_by_a_full_disk(tiny_llama: Path) -> None:
    arguments = f"generate {tiny_llama} hello -n 4 --kv-memory 16M"
    run = in_shell(f"{PDX} {arguments} > /dev/full")
    assert (run.returncode, run.stderr) == (1, FULL)


@pytest.mark.parametrize("role", ["decode --peer 127.0.0.1:1", "serve {model}"])
def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_loaded(
    tiny_llama: Path, role: str
) -> None:
    command = role.format(model=tiny_llama)
    for file, why in (("/dev/full", "No space left"), ("/no/such/folder/t", "No such file")):
        run = in_shell(f"{PDX} {command} --trace {file}")
        assert run.returncode == 1
        assert run.stderr.startswith(f"error: cannot write the trace to {file}: {why}")


def test_a_drawing_that_cannot_be_written_is_named_and_the_answer_is_printed_no_less(
    tmp_path: Path,
) -> None:
    run = in_shell(f"{PDX} inspect topology --svg {tmp_path}/none/t.svg")
    assert run.returncode == 1
    assert run.stderr == f"error: cannot write {tmp_path}/none/t.svg: No such file or directory\n"


def test_a_disk_that_is_full_later_cuts_a_trace_short_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, "decoder")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, trace._fd)
    os.close(full)
    for i in range(3000):
        trace.on_pass(float(i), i + 0.5, num_tokens=9, num_requests=3)
    trace.close()
    [said] = [record.getMessage() for record in caplog.records]
    assert said == f"the trace in {path} is cut short, the node goes on: No space left on device"


def test_a_trace_on_a_full_disk_is_refused() -> None:
    with pytest.raises(OutputError, match="/dev/full: No space left"):
        TraceWriter(Path("/dev/full"), "decoder")
