"""`pdx inspect transfers`: the KV caches on their way into a decoder and the last that came, or on
their way out of a prefiller.

Asks the decoder's API, or the prefiller's control port; `--watch` asks again and again.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from pdx.cli.options import with_settings
from pdx.cli.tables import Table, print_tables
from pdx.config.resolve import Settings
from pdx.errors import ConfigError
from pdx.lab.api import ApiError, api_base, error_of, headers

if TYPE_CHECKING:
    import httpx
    from rich.console import RenderableType

    from pdx.metrics.transfers import NodeTransfers, Sends, SendView, TransferView

__all__ = ["transfers"]

_NUM_RECENT = 10
_WATCH_S = 0.25
_COLUMNS = ("id", "state", "landed", "MiB", "tokens", "age", "took", "from", "fabric")
_SEND_COLUMNS = ("id", "state", "computed", "tokens", "atoms", "to", "fabric")
_TEXTS = ("state", "from", "to")
_STYLES = {
    "landing": "cyan",
    "open": "cyan",
    "sealed": "green",
    "landed": "green",
    "refused": "yellow",
    "lost": "red",
}


@with_settings()
def transfers(
    settings: Settings,
    node: Annotated[
        str,
        typer.Argument(metavar="NODE", help="URL of a decoder, or a prefiller's control address."),
    ],
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep showing them, until Ctrl-C; needs a terminal.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="PDX_API_KEY", metavar="KEY", help="Sent as a bearer token."),
    ] = None,
) -> None:
    """Show the KV caches on their way into a decoder, or out of a prefiller."""
    import httpx

    base = api_base(node).removesuffix("/v1")
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


def _parse(raw: bytes) -> NodeTransfers:
    import msgspec

    from pdx.metrics.transfers import NodeTransfers

    try:
        found: NodeTransfers = msgspec.json.decode(raw, type=NodeTransfers)
        return found
    except msgspec.MsgspecError as error:
        raise ApiError(f"the answer tells of no transfers: {error}", kind="protocol") from error


def _print(found: NodeTransfers) -> None:
    print_tables(_table(part) for part in _parts(found))


@dataclass(frozen=True, slots=True)
class _Part:
    """Some transfers, newest first."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    states: tuple[str, ...]
    reasons: tuple[str, ...] = ()


def _parts(found: NodeTransfers) -> list[_Part]:
    from pdx.metrics.transfers import Transfers

    if isinstance(found, Transfers):
        recent = found.recent[: -_NUM_RECENT - 1 : -1]
        return [_incoming("under way", found.live[::-1]), _incoming("the last ones", recent)]
    return [_outgoing(found)]


def _incoming(title: str, views: list[TransferView]) -> _Part:
    states, reasons = tuple(view.state for view in views), tuple(_reasons(views))
    return _Part(title, _COLUMNS, tuple(map(_cells, views)), states, reasons)


def _outgoing(sends: Sends) -> _Part:
    layers = ", ".join(
        f"layer {rank.layers_done} of {rank.num_layers} of pass {rank.pass_idx}"
        for rank in sends.ranks
    )
    rows = tuple(map(_send_cells, sends.live))
    states = tuple(view.state for view in sends.live)
    return _Part(f"going out; {layers}", _SEND_COLUMNS, rows, states)


def _send_cells(view: SendView) -> tuple[str, ...]:
    computed = f"{view.num_armed / view.num_tokens:.0%}" if view.num_tokens else "-"
    numbers = (str(view.num_tokens), str(view.atoms))
    return (str(view.transfer_id), view.state, computed, *numbers, view.decoder, view.provider)


def _table(part: _Part) -> Table:
    if not part.rows:
        return Table(title=part.title, rows=(("none",),))
    note = "; ".join(part.reasons)
    texts = tuple(i for i, name in enumerate(part.columns) if name in _TEXTS)
    return Table(title=part.title, columns=part.columns, rows=part.rows, note=note, texts=texts)


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


def _drawing(found: NodeTransfers) -> RenderableType:
    """For a terminal, of 80 columns or more: colours, and what does not fit is cut."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn: list[RenderableType] = []
    for part in _parts(found):
        table = RichTable(title=part.title, title_justify="left", box=box.SIMPLE, padding=0)
        for name in part.columns:
            table.add_column(
                name,
                justify="left" if name in _TEXTS else "right",
                no_wrap=True,
                overflow="ellipsis",
            )
        for row, state in zip(part.rows, part.states, strict=True):
            table.add_row(*map(Text, row), style=_STYLES.get(state, "dim"))
        drawn += [table, *(Text(f" {reason}", style="dim") for reason in part.reasons)]
    return Group(*drawn)
