"""`pdx inspect pages`: what a running node's KV pages are, and who waits for them.

Asks the node's /health: a decoder's API or a prefiller's control port; `--watch` asks again and
again.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from pdx.cli.options import with_settings
from pdx.cli.tables import Table, print_tables
from pdx.config.resolve import Settings
from pdx.errors import ConfigError
from pdx.lab.api import ApiError, api_base

if TYPE_CHECKING:
    import httpx

    from pdx.metrics.node import Health

__all__ = ["pages"]

_WATCH_S = 0.25
_PAGES, _REQUESTS = "pages_", "requests_"
#: What each state means.
_MEANINGS = {
    "free": "anybody may have them",
    "leased": "a request has them",
    "in_flight": "a prefiller may write to them",
    "filled": "complete, and read",
    "quarantined": "given up, but not proved to be left alone",
    "cached": "a known prefix; free for whoever needs them",
}


@with_settings()
def pages(
    settings: Settings,
    node: Annotated[
        str,
        typer.Argument(metavar="NODE", help="URL of a decoder, or a prefiller's control address."),
    ],
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep showing them, until Ctrl-C; needs a terminal.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a node's KV pages are, and who waits for them."""
    import httpx

    base = api_base(node).removesuffix("/v1")
    if watch and (as_json or not sys.stdout.isatty()):
        raise ConfigError("--watch draws on a terminal", hint="leave it out to print once")
    with httpx.Client(timeout=10) as client:
        if watch:
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    sys.stdout.write("\x1b[2J\x1b[H")
                    _print(_ask(client, base)[1])
                    sys.stdout.flush()
                    time.sleep(_WATCH_S)
            return
        raw, health = _ask(client, base)
    if as_json:
        sys.stdout.write(raw.decode() + "\n")
        return
    _print(health)


def _ask(client: httpx.Client, base: str) -> tuple[bytes, Health]:
    import httpx
    import msgspec

    from pdx.metrics.node import Health

    try:
        raw = client.get(f"{base}/health").content
        return raw, msgspec.json.decode(raw, type=Health)
    except httpx.HTTPError as error:
        raise ApiError(
            f"no answer from {base}: {error}", kind="connection", hint="check the address"
        ) from error
    except msgspec.MsgspecError as error:
        raise ApiError(
            f"{base} tells of no pages: {error}", kind="protocol", hint="is this a pdx node?"
        ) from error


def _print(health: Health) -> None:
    pages = _of_kind(health.counts, _PAGES)
    total = sum(pages.values())
    rows = tuple(
        (state, str(count), f"{count / total:.0%}" if total else "-", _MEANINGS.get(state, ""))
        for state, count in pages.items()
    )
    requests = _of_kind(health.counts, _REQUESTS)
    waiting = ", ".join(f"{count} {state}" for state, count in requests.items())
    print_tables(
        [
            Table(
                title=f"{health.status}: {health.detail}",
                columns=("pages", "number", "share", ""),
                rows=rows,
                texts=(3,),
                note=f"{total} pages; requests: {waiting or 'none'}",
            )
        ]
    )


def _of_kind(counts: Mapping[str, int], kind: str) -> dict[str, int]:
    return {
        name.removeprefix(kind): count for name, count in counts.items() if name.startswith(kind)
    }
