"""Tables and help pages on narrow terminals: nothing is cut, no number is broken."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from pdx.cli.main import app
from pdx.cli.tables import Table, _parts, _plain, print_tables
from tests.cli.help_pages import commands
from tests.cli.terminal import terminal

WORDS = st.text("abcdefgh", min_size=1, max_size=9)
TEXTS = st.lists(WORDS, min_size=0, max_size=12).map(" ".join)
NUMBERS = st.integers(-(10**12), 10**12).map("{:,}".format)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Tables with a text in the first column, and numbers and texts in the others."""
    num_columns = draw(st.integers(2, 9))
    texts = tuple(draw(st.sets(st.integers(1, num_columns - 1))))
    kinds = [TEXTS if i == 0 or i in texts else NUMBERS for i in range(num_columns)]
    rows = draw(st.lists(st.tuples(*kinds), min_size=1, max_size=5))
    columns = tuple(f"c{i}" for i in range(num_columns))
    return Table(title="title", columns=columns, rows=tuple(rows), texts=texts, note="a note")


def cells(table: Table) -> list[str]:
    """All words of all columns but the first, which every part of a table repeats."""
    rows = [table.columns or (), *table.rows]
    return sorted(word for row in rows for cell in row[1:] for word in cell.split())


@given(table=tables(), room=st.integers(45, 120))
def test_any_table_fits_and_keeps_every_word_and_number(table: Table, room: int) -> None:
    parts = list(_parts(table, room))
    assert sorted(word for part in parts for word in cells(part)) == cells(table)
    for part in parts:
        shown = _plain(part, room)
        assert max(map(len, shown.splitlines())) <= room
        for word in cells(part):
            assert word in shown


@given(table=tables())
def test_without_a_width_a_table_has_one_line_a_row(table: Table) -> None:
    [part] = _parts(table, None)
    assert len(_plain(part, None).splitlines()) == len(table.rows) + 3


@pytest.mark.parametrize("columns", [80, 60])
def test_a_terminal_gets_the_same_words(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = tuple(f"number {i}" for i in range(8))
    row = tuple(f"{10**9 + i:,}" for i in range(7))
    table = Table(title="t", columns=names, rows=(("a name of some words", *row),))

    class Screen(StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "dumb")
    print_tables([table])
    shown = screen.getvalue()
    assert max(map(len, shown.splitlines())) <= columns
    for word in cells(table):
        assert word in shown


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize(
    "command",
    [
        "inspect fabric --peer 127.0.0.1",
        "bench kernels --offline",
        "sim --histories 2 --requests 5",
    ],
)
def test_commands_fit_narrow_terminals(command: str, columns: int) -> None:
    shown = run(command, columns)
    assert max(map(len, shown.splitlines())) <= columns
    assert "…" not in shown


def test_an_answer_about_a_peer_is_printed_once() -> None:
    assert run("inspect fabric --peer 127.0.0.1", 80).count("shm, else tcp, from 127.0.0.1") == 1


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("command", commands())
def test_help_pages_cut_no_flag_no_choice_and_no_variable(command: str, columns: int) -> None:
    shown = run(f"{command} --help", columns)
    assert max(map(len, shown.splitlines())) <= columns
    assert "…" not in shown
    for name in wanted_in(command):
        assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown), name


def wanted_in(command: str) -> Iterator[str]:
    """Flags, variables and choices of a command."""
    found = typer.main.get_command(app)
    for word in command.split():
        found = found.commands[word]  # type: ignore[attr-defined]
    for param in found.params:
        if param.param_type_name == "option" and not getattr(param, "hidden", False):
            yield from (*param.opts, *param.secondary_opts)
        text = getattr(param, "help", None) or ""
        if listed := re.search(r"one of ([^;\]]+)", text):
            yield from listed[1].split(", ")
        yield from re.findall(r"PDX_\w+", text)


@pytest.mark.parametrize(("command", "last"), [("fabric", "open files"), ("topology", "worker:")])
def test_a_terminal_of_60_columns_shows_everything(command: str, last: str) -> None:
    with terminal("inspect", command, COLUMNS="60") as screen:
        shown = screen.expect(last)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 60


def run(command: str, columns: int) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pdx", *command.split()],
        env=os.environ | {"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return done.stdout
