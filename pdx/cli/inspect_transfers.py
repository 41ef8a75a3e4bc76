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
_COLUMNS = ("transfer", "state", "landed", "size", "tokens", "age", "took", "from", "fabric")
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
    print_tables(_tables(_parse(raw)))


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


def _tables(found: Transfers) -> list[Table]:
    recent = found.recent[-_NUM_RECENT:]
    return [_table("under way", found.live), _table("the last ones", recent)]


def _table(title: str, views: list[TransferView]) -> Table:
    if not views:
        return Table(title=title, rows=(("none",),))
    rows = tuple(_cells(view) for view in reversed(views))
    return Table(title=title, columns=_COLUMNS, rows=rows)


def _cells(view: TransferView) -> tuple[str, ...]:
    state = view.state if view.is_settled or view.state == "landing" else f"{view.state}, unsettled"
    took = "-" if view.duration_s is None else _seconds(view.duration_s)
    return (
        str(view.transfer_id),
        f"{state}: {view.reason}" if view.reason else state,
        f"{view.atoms_landed / view.atoms:.0%}" if view.atoms else "-",
        _size(view.num_bytes),
        str(view.num_tokens),
        _seconds(view.age_s),
        took,
        view.prefiller,
        view.provider,
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _watch(client: httpx.Client, base: str) -> None:
    from rich.live import Live

    with Live(_drawing(_parse(_ask(client, base))), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(_WATCH_S)
            live.update(_drawing(_parse(_ask(client, base))), refresh=True)


def _drawing(found: Transfers) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    tables = []
    for title, views in (("under way", found.live), ("the last ones", found.recent[-_NUM_RECENT:])):
        table = RichTable(title=title, title_justify="left", box=box.SIMPLE, expand=True)
        for index, name in enumerate(_COLUMNS):
            table.add_column(name, justify="left" if index == 1 else "right")
        for view in reversed(views):
            cells = map(Text, _cells(view))
            table.add_row(*cells, style=_STYLES.get(view.state, "dim"))
        tables.append(table)
    return Group(*tables)
