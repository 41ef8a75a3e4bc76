"""The help pages as a terminal of 100 columns shows them.

python tests/cli/help_pages.py      writes tests/cli/help/, to be read before it is committed
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer

from pdx.cli.main import app

__all__ = ["FOLDER", "commands", "help_page", "path_of"]

FOLDER = Path(__file__).parent / "help"


def commands() -> list[str]:
    """Every command, without its `pdx`; the empty one is `pdx` itself."""

    def below(command: Any, name: str) -> list[str]:
        children = getattr(command, "commands", {})
        return [name, *(n for key, c in children.items() for n in below(c, f"{name} {key}"))]

    return [name.strip() for name in below(typer.main.get_command(app), "")]


def help_page(command: str) -> str:
    """What `pdx COMMAND --help` prints, without spaces at the ends of lines."""
    plain = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "LC_ALL": "C.UTF-8"}
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    run = subprocess.run(
        [sys.executable, "-m", "pdx", *command.split(), "--help"],
        env=kept | plain | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert run.stderr == ""
    return "\n".join(line.rstrip() for line in run.stdout.splitlines()).strip() + "\n"


def path_of(command: str) -> Path:
    """Where a page's snapshot is."""
    return FOLDER / f"{'-'.join(['pdx', *command.split()])}.txt"


if __name__ == "__main__":
    for stale in FOLDER.glob("*.txt"):
        stale.unlink()
    for each in commands():
        path_of(each).write_text(help_page(each), "utf-8")
