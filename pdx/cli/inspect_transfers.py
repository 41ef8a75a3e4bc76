"""`pdx inspect transfers`: the KV caches on their way into a decoder, and the last that came.

Asks the decoder's API; `--watch` asks again and again.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from pdx.cli.api import ApiError, api_base, error_of, headers
from pdx.cli.options import with_settings
from pdx.cli.tables import Table, print_tables
from pdx.config.resolve import Settings
from pdx.errors import ConfigError

if TYPE_CHECKING:
    import httpx
    from rich.console import RenderableType

    from pdx.metrics.transfers import Transfers, TransferView

__all__ = ["transfers"]

_NUM_RECENT = 10
_WATCH_S = 0.25
_COLUMNS = ("id", "state", "landed", "MiB", "tokens", "age", "took", "from", "fabric")
_STYLES = {"landing": "cyan", "landed": "green", "refused": "yellow", "lost": "red"}


@with_settings()
def transfers(
    settings: Settings,
    url: Annotated[str, typer.Argument(metavar="URL", help="URL of a decoder's API.")],
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep showing them, until Ctrl-C; needs a terminal.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="PDX_API_KEY", metavar="KEY", help="Sent as a bearer token."),
    ] = None,
) -> None:
    """Show the KV caches on their way into a decoder, and the last that came."""
    import httpx

    base = api_base(url).removesuffix("/v1")
    if watch and (as_json or not sys.stdout.isatty()):
        raise ConfigError("--watch draws on a terminal", hint="leave it out to print once")
    with httpx.Client(timeout=10, headers=headers(api_key)) as client:
        if watch:
            with contextlib.suppress(KeyboardInterrupt):
                _watch(client, base)
            return
        raw = _ask(client, base)
    if as_json:
        sys.stdout.write(raw.decode() + "\n")
        return
    _print(_parse(raw))


def _ask(client: httpx.Client, base: str) -> bytes:
    import httpx

    try:
        answer = client.get(f"{base}/pdx/transfers")
    except httpx.HTTPError as error:
        raise ApiError(
            f"no answer from {base}: {error}", kind="connection", hint="check the URL"
        ) from error
    if answer.status_code == 404:
        raise ApiError(f"{base} tells of no transfers", kind="http_404", hint="is this a pdx node?")
    if answer.status_code != 200:
        raise error_of(answer.status_code, answer.content)
    return answer.content


def _parse(raw: bytes) -> Transfers:
    import msgspec

    from pdx.metrics.transfers import Transfers

    try:
        return msgspec.json.decode(raw, type=Transfers)
    except msgspec.MsgspecError as error:
        raise ApiError(f"the answer tells of no transfers: {error}", kind="protocol") from error


def _print(found: Transfers) -> None:
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(_drawing(found))
        return
    print_tables(_table(title, views) for title, views in _parts(found))


def _parts(found: Transfers) -> list[tuple[str, list[TransferView]]]:
    """Titles and transfers, newest first."""
    recent = found.recent[: -_NUM_RECENT - 1 : -1]
    return [("under way", found.live[::-1]), ("the last ones", recent)]


def _table(title: str, views: list[TransferView]) -> Table:
    if not views:
        return Table(title=title, rows=(("none",),))
    rows = tuple(map(_cells, views))
    return Table(title=title, columns=_COLUMNS, rows=rows, note="; ".join(_reasons(views)))


def _cells(view: TransferView) -> tuple[str, ...]:
    return (
        str(view.transfer_id),
        view.state,
        f"{view.atoms_landed / view.atoms:.0%}" if view.atoms else "-",
        f"{view.num_bytes / 2**20:.1f}",
        str(view.num_tokens),
        f"{view.age_s:.1f} s",
        "-" if view.duration_s is None else _seconds(view.duration_s),
        view.prefiller,
        view.provider,
    )


def _reasons(views: list[TransferView]) -> list[str]:
    return [f"{view.transfer_id}: {view.reason}" for view in views if view.reason]


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _watch(client: httpx.Client, base: str) -> None:
    from rich.live import Live

    with Live(_drawing(_parse(_ask(client, base))), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(_WATCH_S)
            live.update(_drawing(_parse(_ask(client, base))), refresh=True)


def _drawing(found: Transfers) -> RenderableType:
    """For a terminal, of 80 columns or more: colours, and what does not fit is cut."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn: list[RenderableType] = []
    for title, views in _parts(found):
        table = RichTable(title=title, title_justify="left", box=box.SIMPLE, padding=0)
        for name in _COLUMNS:
            is_text = name in ("state", "from")
            table.add_column(
                name, justify="left" if is_text else "right", no_wrap=True, overflow="ellipsis"
            )
        for view in views:
            style = _STYLES.get(view.state, "dim")
            table.add_row(*map(Text, _cells(view)), style=style)
        drawn += [table, *(Text(f" {reason}", style="dim") for reason in _reasons(views))]
    return Group(*drawn)
