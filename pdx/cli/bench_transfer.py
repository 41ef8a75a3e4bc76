"""`pdx bench transfer`: how fast the fabric moves pages, next to the limits and to its peers."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdx.cli.options import with_settings
from pdx.cli.output import announce, status_line
from pdx.cli.plots import check_plot, write_plot
from pdx.config.providers import Provider
from pdx.config.resolve import Settings
from pdx.errors import ConfigError, FabricError, PdxError, PeerError

if TYPE_CHECKING:
    from pdx.lab.transfers.pattern import Memory
    from pdx.lab.transfers.run import Plan
    from pdx.lab.transfers.systems import PdxPair, System

__all__ = ["transfer"]

_WHERE, _PAGES, _REPORT = "Where", "Pages", "Report"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}
_LATENCY_ROUNDS = 500
_MAX_BATCH_PAGES, _BATCH_BYTES = 1024, 64 << 20


@with_settings()
def transfer(
    settings: Settings,
    fabric: Annotated[
        str, typer.Option(metavar="tcp|shm", rich_help_panel=_WHERE, help="How pages travel.")
    ] = Provider.TCP,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            rich_help_panel=_WHERE,
            help="Be the receiver for --peer on another host, until interrupted. Whoever reaches "
            "the port may use it.",
        ),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            rich_help_panel=_WHERE,
            help="Write to a receiver that listens there; without it, to a process of this host.",
        ),
    ] = None,
    bind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            rich_help_panel=_WHERE,
            help="Address of this side's network card; again for each more, to stripe over all. "
            "Without --peer the receiver takes the same.",
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            rich_help_panel=_WHERE,
            help="Measure these in the same rounds, separated by commas: memcpy; raw (libfabric "
            "with nothing above it, one page a write and four); nixl; mooncake.",
        ),
    ] = None,
    peers_python: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_WHERE,
            help="The Python that nixl and mooncake are installed for.",
        ),
    ] = None,
    sizes: Annotated[
        str,
        typer.Option(
            metavar="BYTES", rich_help_panel=_PAGES, help="Page sizes, such as 4K,64K,1M."
        ),
    ] = "4K,16K,64K,256K,1M,4M",
    pages: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="PAGES",
            rich_help_panel=_PAGES,
            help="Writes of one batch (pages by layers); a batch also ends at 64 MiB.",
        ),
    ] = _MAX_BATCH_PAGES,
    layers: Annotated[
        int,
        typer.Option(
            min=1, metavar="LAYERS", rich_help_panel=_PAGES, help="Places that each page has."
        ),
    ] = 1,
    neighbours: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="PAGES",
            rich_help_panel=_PAGES,
            help="Pages that lie side by side at both ends, which pdx merges into one write; 1: "
            "all lie apart, nothing is merged.",
        ),
    ] = 1,
    pool: Annotated[
        str, typer.Option(metavar="BYTES", rich_help_panel=_PAGES, help="Memory of each side.")
    ] = "256M",
    ahead: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="BATCHES",
            rich_help_panel=_PAGES,
            help="pdx's batches in flight; the others have one.",
        ),
    ] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="ROUNDS", rich_help_panel=_REPORT, help="Medians of.")
    ] = 3,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=20,
            metavar="SECONDS",
            rich_help_panel=_REPORT,
            help="For each system, size and round; two batches at least.",
        ),
    ] = 0.12,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=_REPORT, help="Print one JSON object.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_REPORT,
            help="Draw throughput over page size: .svg, or .png where cairosvg is installed.",
        ),
    ] = None,
) -> None:
    """Measure how fast pages move between two processes: bandwidth, latency, every byte compared.

    Pages are taken in a random order from memory of the kind that a node uses. The clock stops when
    the receiver has counted them all.
    """
    from pdx.cli.bench_transfer_report import print_json, print_text
    from pdx.lab.transfers.pattern import shared_memory
    from pdx.lab.transfers.run import run_rounds

    if listen is not None:
        if peer is not None or compare is not None:
            raise ConfigError("--listen receives only; leave out --peer and --compare")
        _listen(listen, bind or ())
        return
    provider = _provider(fabric, peer)
    if bind and provider == Provider.SHM:
        raise ConfigError("--fabric shm needs no address; leave out --bind")
    comparisons = [name for name in (compare or "").split(",") if name]
    if peer is not None and comparisons:
        raise ConfigError("--compare measures on this host; leave out --peer")
    plan = _plan(sizes, pages, layers, neighbours, pool, rounds, seconds)
    check_plot(plot)
    _check_memory(plan.pool_bytes, 1 if peer is not None else 2)
    with contextlib.ExitStack() as stack:
        systems: list[System]
        if peer is not None:
            pair = _to_peer(provider, peer, bind or (), plan.pool_bytes, ahead)
            stack.callback(pair.close)
            systems = [pair]
        else:
            memory = stack.enter_context(shared_memory(plan.pool_bytes))
            pair = _here(provider, bind or (), plan.pool_bytes, memory, ahead)
            stack.callback(pair.close)
            systems = [pair]
            for other in _others(comparisons, provider, plan.pool_bytes, memory, peers_python):
                stack.callback(other.close)
                systems.append(other)
        with _progress(plan.rounds * len(plan.page_sizes) * len(systems)) as on_cell:
            results = run_rounds(plan, systems, on_cell, _tell_failure)
            trips = {s: pair.round_trips_us(s, _LATENCY_ROUNDS) for s in plan.page_sizes}
    figures = results.figures()
    latency = {size: _half(sorted(values)) for size, values in trips.items()}
    (print_json if as_json else print_text)(plan, provider, figures, latency)
    if plot is not None:
        from pdx.lab.transfers.plot import throughput_svg

        title = f"Random pages over {provider}, counted by the receiver"
        write_plot(plot, throughput_svg(figures, title))
    if wrong := sum(each.wrong for each in figures):
        raise FabricError(f"{wrong} pages did not hold their bytes")


def _provider(name: str, peer: str | None) -> Provider:
    match name:
        case Provider.TCP:
            return Provider.TCP
        case Provider.SHM if peer is None:
            return Provider.SHM
        case Provider.SHM:
            raise ConfigError("--fabric shm joins processes of one host; leave out --peer")
    raise ConfigError(f"--fabric {name}: it can be tcp or shm")


def _plan(
    sizes: str, pages: int, layers: int, neighbours: int, pool: str, rounds: int, seconds: float
) -> Plan:
    from pdx.lab.transfers.run import Plan

    plan = Plan(
        pool_bytes=_bytes("--pool", pool),
        page_sizes=tuple(_bytes("--sizes", each) for each in sizes.split(",")),
        batch_pages=pages,
        batch_bytes=_BATCH_BYTES,
        layers=layers,
        neighbours=neighbours,
        seconds=seconds,
        rounds=rounds,
    )
    for size in plan.page_sizes:
        if size < 512 or size % 8:
            raise ConfigError(f"--sizes {size}: at least 512 bytes, in steps of 8")
        if plan.cell(size, 0).layer_pages < max(neighbours, 1):
            raise ConfigError(f"--pool {pool} is too small for {layers} layers of {size} bytes")
    if len(set(plan.page_sizes)) != len(plan.page_sizes):
        raise ConfigError(f"--sizes {sizes}: one is named twice")
    return plan


def _check_memory(pool_bytes: int, count: int) -> None:
    """The pools are filled, and what runs out of memory then is the whole host."""
    from pdx.lab.transfers.pattern import available_bytes

    available = available_bytes()
    if available is not None and count * pool_bytes > available:
        raise ConfigError(
            f"--pool {pool_bytes >> 20}M is for each side: this host has "
            f"{available >> 20}M of memory left for {count}"
        )


def _bytes(flag: str, text: str) -> int:
    match = re.fullmatch(r"(\d+)([KM]?)", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"{flag} {text}: write bytes such as 4096, 64K or 1M")
    return int(match[1]) * _UNITS[match[2]]


def _host_port(flag: str, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{flag} {text}: write HOST:PORT")
    return host.strip("[]"), int(port)


def _listen(where: str, bind: Sequence[str]) -> None:
    """Serve one writer after another, until SIGINT."""
    import socket

    from pdx.lab.transfers.channel import peer_name
    from pdx.lab.transfers.receiver import serve

    host, port = _host_port("--listen", where)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {where}: {error}") from error
    with server:
        announce(f"listening on {peer_name(host, server.getsockname()[1])}")
        while True:
            try:
                connection, address = server.accept()
                status_line(f"a writer from {address[0]}")
                # Listening on all addresses, the fabric takes the one that the writer has reached.
                serve(connection, bind or [connection.getsockname()[0]], peer_name(*address[:2]))
            except (FabricError, PeerError) as error:
                status_line(f"the writer's run ended: {error.message}")
            except KeyboardInterrupt:
                return


def _to_peer(
    provider: Provider, peer: str, bind: Sequence[str], pool_bytes: int, ahead: int
) -> PdxPair:
    from pdx.lab.transfers.systems import PdxPair, remote_receiver

    channel, host = remote_receiver(*_host_port("--peer", peer))
    return PdxPair(
        channel,
        None,
        provider=provider,
        bind_hosts=bind or [host],
        pool_bytes=pool_bytes,
        ahead=ahead,
    )


def _here(
    provider: Provider, bind: Sequence[str], pool_bytes: int, memory: Memory, ahead: int
) -> PdxPair:
    from pdx.lab.transfers.systems import PdxPair, local_receiver

    channel, receiver = local_receiver(bind, memory.target_fd)
    return PdxPair(
        channel,
        receiver,
        provider=provider,
        bind_hosts=bind,
        pool_bytes=pool_bytes,
        ahead=ahead,
        file=memory.source_fd,
    )


def _others(
    names: Sequence[str],
    provider: Provider,
    pool_bytes: int,
    memory: Memory,
    python: str | None,
) -> Iterator[System]:
    from pdx.lab.transfers.children import open_systems

    for name in names:
        yield from open_systems(name, provider, pool_bytes, memory, python)


def _tell_failure(name: str, error: PdxError) -> None:
    status_line(f"{name} is left out: {error.message}")


def _half(ordered: Sequence[float]) -> tuple[float, float]:
    """Half a round trip: p50 and p99, microseconds."""
    return ordered[len(ordered) // 2] / 2, ordered[len(ordered) * 99 // 100] / 2


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("cells", total=total)
        begun = -1

        def begin(what: str) -> None:
            nonlocal begun
            begun += 1
            progress.update(task, completed=begun, description=what)

        yield begin
