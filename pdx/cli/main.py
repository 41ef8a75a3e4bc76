"""The `pdx` command: one file per verb. Imports neither torch nor anything else that is slow:
commands import what they need when they run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from pdx.cli import bench, chat, decode, generate, inspect, prefill, serve, sim
from pdx.cli.options import HELP_STYLE
from pdx.cli.output import print_error
from pdx.cli.streams import ReaderGone, open_streams
from pdx.errors import PdxError

__all__ = ["app", "main"]

_REFUSED, _USAGE, _INTERNAL, _INTERRUPTED = 1, 2, 70, 130

app = typer.Typer(
    name="pdx",
    help="Disaggregated LLM inference: prefill on one node, decode on another.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=HELP_STYLE,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # A narrow terminal's last columns too: the longest variable needs them.
        "terminal_width": shutil.get_terminal_size().columns,
    },
)
app.command("serve")(serve.serve)
app.command("prefill")(prefill.prefill)
app.command("decode")(decode.decode)
app.command("chat")(chat.chat)
app.command("generate")(generate.generate)
app.command("sim")(sim.sim)
app.add_typer(inspect.app)
app.add_typer(bench.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        from pdx import __version__

        typer.echo(f"pdx {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of every command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(_USAGE)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 refused, 2 usage, 70 internal, 130 interrupted."""
    open_streams()
    code = _run(lambda: app(standalone_mode=False, prog_name="pdx") or 0)
    # Also behind an error: what was written before it may still be on its way.
    sys.exit(_run(_flush) or code)


def _flush() -> int:
    sys.stdout.flush()
    return 0


def _run(body: Callable[[], int]) -> int:
    """Do part of the command; the exit code."""
    try:
        return body()
    except PdxError as error:
        print_error(error.message, error.hint)
        return error.exit_code
    except ReaderGone:
        return _REFUSED
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except OSError as error:  # no bug of ours: a full disk, too many open files, no more processes
        print_error(f"the system refused: {error}", "--debug shows where")
        return _REFUSED
    except Exception as error:  # noqa: BLE001 - the process's edge
        usage = _usage(error)
        if usage is not None:
            if usage[0]:  # nothing is said where a help page has been shown instead
                print_error(*usage)
            return _USAGE
        print_error(
            f"a bug in pdx: {type(error).__name__}: {error}", "run it again with --debug, report it"
        )
        return _INTERNAL


def _usage(error: Exception) -> tuple[str, str] | None:
    """Message and hint of what Typer has refused; None: it is no such error. Which package its
    classes live in depends on its version.
    """
    if not hasattr(error, "format_message"):
        return None
    context = getattr(error, "ctx", None)
    command = "pdx" if context is None else context.command_path
    message = error.format_message().rstrip(".")
    return message[:1].lower() + message[1:], f"{command} --help"
