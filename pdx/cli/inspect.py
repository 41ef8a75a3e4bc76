"""`pdx inspect`: what is there, looked at without serving anything. One file per noun."""

from __future__ import annotations

import typer

from pdx.cli import (
    inspect_fabric,
    inspect_model,
    inspect_pages,
    inspect_topology,
    inspect_transfers,
)
from pdx.cli.options import HELP_STYLE

__all__ = ["app"]

app = typer.Typer(
    name="inspect",
    help="Look at a model, at this machine, or at a running node's pages and transfers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=HELP_STYLE,
)
app.command("model")(inspect_model.model)
app.command("topology")(inspect_topology.topology)
app.command("fabric")(inspect_fabric.fabric)
app.command("pages")(inspect_pages.pages)
app.command("transfers")(inspect_transfers.transfers)


@app.callback()
def _group() -> None:
    """A group of commands also while it has one."""
