"""The `pdx` command: one file per verb. Imports neither torch nor anything else that is slow:
commands import what they need when they run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pdx import __version__
from pdx.cli import decode, generate, prefill
from pdx.cli.output import print_error
from pdx.errors import PdxError

__all__ = ["app", "main"]

app = typer.Typer(
    name="pdx",
    help="Disaggregated LLM inference: prefill on one node, decode on another.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("prefill")(prefill.prefill)
app.command("decode")(decode.decode)
app.command("generate")(generate.generate)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pdx {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of every command."""


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 refused, 2 usage, 70 internal, 130 interrupted."""
    try:
        app()
    except PdxError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
