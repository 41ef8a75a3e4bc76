"""The command line: help, completion, errors and their exit codes, what goes where."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pdx import __version__
from tests.cli.help_pages import FOLDER, commands, help_page, path_of

ROOT = Path(__file__).parents[2]


def pdx(*arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "pdx", *arguments],
        input=stdin,
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"} | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


@pytest.mark.parametrize("command", commands())
def test_help_pages_are_as_they_were_read(command: str) -> None:
    """Changed on purpose: python -m tests.cli.help_pages, then read the difference."""
    assert help_page(command) == path_of(command).read_text("utf-8")


def test_every_help_page_belongs_to_a_command() -> None:
    assert {path_of(command) for command in commands()} == set(FOLDER.iterdir())


def test_the_reference_is_what_its_script_writes() -> None:
    """Changed on purpose: python scripts/cli_reference.py."""
    reference = runpy.run_path(str(ROOT / "scripts" / "cli_reference.py"))["reference"]
    assert (ROOT / "docs" / "cli.md").read_text("utf-8") == reference()


def test_an_interrupt_while_the_command_is_imported_is_quiet(tmp_path: Path) -> None:
    """A typer that stays in the middle of its import."""
    (tmp_path / "typer.py").write_text("print('importing', flush=True); input()")
    process = subprocess.Popen(
        [sys.executable, "-m", "pdx", "--version"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert process.communicate() == (b"", b"")


def test_version() -> None:
    run = pdx("--version")
    assert (run.returncode, run.stdout) == (0, f"pdx {__version__}\n")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [("pdx dec", "decode"), ("pdx decode --max-s", "--max-seqs"), ("pdx decode --fabric s", "shm")],
)
def test_a_shell_completes_commands_flags_and_choices(words: str, wanted: str) -> None:
    count = len(words.split()) - 1
    run = pdx(
        _PDX_COMPLETE="complete_bash",
        _TYPER_COMPLETE_ARGS=words,
        COMP_WORDS=words,
        COMP_CWORD=str(count),
    )
    assert wanted in run.stdout.split()


def in_bash(script: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a shell in which `pdx` is this environment's."""
    here = Path(sys.executable).parent
    return subprocess.run(
        ["bash", "-c", f"{script}\n:"],
        env=os.environ | {"HOME": str(home), "PATH": f"{here}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )


def test_completion_that_is_installed_works_in_a_new_shell(tmp_path: Path) -> None:
    shown = in_bash("pdx --show-completion", tmp_path).stdout
    assert "complete -o default -F _pdx_completion pdx" in shown
    in_bash("pdx --install-completion", tmp_path)
    run = in_bash(
        "source ~/.bashrc; COMP_WORDS=(pdx dec); COMP_CWORD=1\n"
        "_pdx_completion pdx; echo ${COMPREPLY[@]}",
        tmp_path,
    )
    assert (run.stdout, run.stderr) == ("decode\n", "")


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["decode"], "--peer is missing", "PDX_PEER"),
        (["serve"], "MODEL is missing", "PDX_MODEL"),
        (["decode", "--frob"], "no such option: --frob", "pdx decode --help"),
        (["dance"], "no such command 'dance'", "pdx --help"),
        (["prefill", "--chunk", "0"], "--chunk 0: it must be at least 1", ""),
        (["prefill", "--chunk"], "option '--chunk' requires an argument", "pdx --help"),
        (["serve", "m", "--colocated", "--prefill", "2"], "--colocated is one node", ""),
        (["serve", "m", "--colocated", "--decode", "2"], "--colocated is one node", ""),
        (["serve", "/no/such/folder"], "is neither a folder nor", "check the path"),
        (["serve", "m", "--http", "1:2:3"], "'1:2:3' is not an address", "brackets"),
        (["chat", "ftp://host"], "'ftp://host' is not a URL", "http://"),
        (["bench", "serve", "a", "b", "c"], "two servers can be compared, not 3", ""),
        (["bench", "serve", "a", "--plot", "x.pdf"], "x.pdf: plots are .svg or .png", "x.svg"),
        (["bench", "serve", "a", "--trace", "/none"], "cannot read /none", ""),
    ],
)
def test_usage_errors_are_named_without_a_traceback(
    arguments: list[str], message: str, hint: str
) -> None:
    run = pdx(*arguments)
    assert run.returncode == 2
    assert run.stdout == ""
    first, *rest = run.stderr.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert hint in "\n".join(rest)
    assert not rest or (rest[0] == "" and rest[1].startswith("hint: "))


def test_a_command_that_is_refused_exits_with_1() -> None:
    run = pdx("chat", "127.0.0.1:1", stdin="hello")
    assert run.returncode == 1
    assert "error: no answer from http://127.0.0.1:1/v1" in run.stderr


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--device", "abacus"], "abacus"),
        (["--kv-memory", "1K"], "hint: give the KV cache more memory"),
        (["--token-ids", "1,2,999999"], "token id 999999 is outside the vocabulary of 512"),
        (["--token-ids", "-1"], "token id -1 is outside the vocabulary of 512"),
        (["--temperature", "inf"], "'--temperature'"),
        (["--top-p", "0"], "'--top-p'"),
    ],
)
def test_what_only_the_rank_can_refuse_is_told_like_any_other_error(
    tiny_llama: Path, flags: list[str], told: str
) -> None:
    prompt = [] if "--token-ids" in flags else ["hello"]
    run = pdx("generate", str(tiny_llama), *prompt, *flags, "-n", "1", PDX_KV_MEMORY="16M")
    assert run.returncode == 2
    assert run.stdout == ""
    # A slow machine says before how much of the weights is loaded.
    assert re.search("^error: ", run.stderr, re.MULTILINE)
    assert told in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("PDX_KV_MEMROY", "no setting has the variable PDX_KV_MEMROY; did you mean PDX_KV_MEMORY?"),
        ("PDX_XYZZY_OF_ABC", "no setting has the variable PDX_XYZZY_OF_ABC, and none is like it"),
    ],
)
@pytest.mark.parametrize("command", ["prefill --print-config", "sim --requests 1"])
def test_a_variable_that_nothing_reads_is_named(command: str, name: str, told: str) -> None:
    run = pdx(*command.split(), **{name: "1", "PDX_LISTEN": "127.0.0.1:0"})
    assert (run.returncode, run.stderr) == (0, f"warning: {told}\n")


def test_a_variable_that_nothing_reads_is_named_before_what_it_should_have_set() -> None:
    run = pdx("serve", PDX_MODLE="m", PDX_LOG_FORMAT="json")
    lines = [json.loads(line)["message"] for line in run.stderr.splitlines()]
    assert lines[0] == "warning: no setting has the variable PDX_MODLE; did you mean PDX_MODEL?"
    assert lines[1].startswith("MODEL is missing")


@pytest.mark.parametrize("group", ["inspect", "bench"])
def test_a_group_without_a_command_says_what_there_is(group: str) -> None:
    run = pdx(group)
    assert run.returncode == 2
    assert "error: \n" not in run.stderr
    assert group in run.stdout + run.stderr


def test_a_bug_exits_with_70_and_shows_its_traceback_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import pdx.lab.api\ndef broken(url):\n    raise KeyError('oops')\n"
        "pdx.lab.api.api_base = broken\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    plain = pdx("chat", "x", stdin="hello", PYTHONPATH=path)
    assert plain.returncode == 70
    assert plain.stderr.startswith("error: a bug in pdx: KeyError: 'oops'\n")
    assert "Traceback" not in plain.stderr
    for debug in (
        pdx("chat", "x", "--debug", stdin="hello", PYTHONPATH=path),
        pdx("chat", "x", stdin="hello", PYTHONPATH=path, PDX_DEBUG="1"),
    ):
        assert debug.returncode == 70
        assert "Traceback (most recent call last)" in debug.stderr
        assert "in broken" in debug.stderr


def test_config_is_printed_with_its_origins_and_without_the_key(tmp_path: Path) -> None:
    file = tmp_path / "pdx.toml"
    file.write_text("[scheduler]\nchunk = 32\n\n[kv]\npages = 3\n")
    run = pdx(
        *("decode", "--config", str(file), "--print-config", "--kv-memory", "2G"),
        PDX_PAGES="4",
        PDX_API_KEY="sesame",
    )
    assert (run.returncode, run.stderr) == (0, "")
    printed = tomllib.loads(run.stdout)
    assert printed["scheduler"]["chunk"] == 32
    assert printed["kv"] == {
        "pages": 4,
        "kv_memory": "2G",
        "kv_dtype": "auto",
        "prefix_cache": True,
        "poison": False,
    }
    assert "sesame" not in run.stdout
    lines = run.stdout.splitlines()
    assert any(x.startswith("chunk = 32 ") and x.endswith(f"# {file}") for x in lines)
    assert any(x.startswith("pages = 4 ") and x.endswith("# PDX_PAGES") for x in lines)
    assert any(x.startswith("# page_size =") and x.endswith("the prefiller's") for x in lines)


def test_a_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "pdx.toml"
    file.write_text("[sheduler]\n")
    run = pdx("prefill", PDX_CONFIG=str(file))
    assert run.returncode == 2
    assert f"error: {file}: unknown section or key 'sheduler'" in run.stderr
    assert "did you mean scheduler?" in run.stderr


def test_json_logs_are_one_object_a_line_errors_included(tmp_path: Path) -> None:
    run = pdx("prefill", "--model", "/no/such/folder", "--log-format", "json")
    assert run.returncode == 2
    [line] = map(json.loads, run.stderr.splitlines())
    assert line["role"] == "prefill"
    assert line["level"] == "error"
    assert line["pid"] > 0
    assert "is neither a folder nor" in line["message"]


def test_a_reader_that_has_had_enough_ends_a_command_quietly(tmp_path: Path) -> None:
    file = tmp_path / "pdx.toml"
    file.write_text(f'[model]\nmodel = "{"x" * 1_000_000}"\n')
    with subprocess.Popen(
        [sys.executable, "-m", "pdx", "prefill", "--print-config", "--config", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": ""},  # unbuffered, Python loses what does not fit
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1) == b"["
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=20) == 1


def test_a_png_without_what_draws_it_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    """Also where it is installed: a module of that name that cannot be imported stands before."""
    (tmp_path / "cairosvg.py").write_text('raise OSError("no library called cairo-2 was found")')
    file = tmp_path / "rates.png"
    run = pdx("bench", "serve", "a", "--plot", str(file), PYTHONPATH=str(tmp_path))
    assert run.returncode == 2
    assert f"error: {file}: a .png needs cairosvg: no library called cairo-2" in run.stderr
    assert "hint: pip install cairosvg, or --plot " in run.stderr
    assert "rates.svg" in run.stderr
