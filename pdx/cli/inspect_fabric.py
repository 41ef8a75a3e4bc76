"""`pdx inspect fabric`: the libfabric in use, its providers and limits, what pdx would choose for a
peer, and what this host lacks.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdx.cli.options import with_settings
from pdx.cli.tables import Table, print_tables
from pdx.config.providers import FabricChoice, Provider
from pdx.config.resolve import Settings
from pdx.errors import FabricError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdx.fabric import LibraryInfo
    from pdx.fabric.provider_info import ProviderInfo
    from pdx.host.readiness import Finding
    from pdx.host.topology import Topology

__all__ = ["fabric"]

_LOOPBACK = "127.0.0.1"


@with_settings()
def fabric(
    settings: Settings,
    peer: Annotated[
        str | None, typer.Option(metavar="HOST", help="Say what would carry pages to this host.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show libfabric, its providers and limits, what pdx would choose, and what is missing.

    Exit code 1 where no libfabric can be loaded, or there is no way to the peer.
    """
    report = _inspect(peer)
    if as_json:
        sys.stdout.write(json.dumps(_as_json(report)) + "\n")
    else:
        print_tables(_as_tables(report))
    if report.error is not None:
        raise report.error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What would carry pages to one peer."""

    peer: str
    #: Providers in the order in which they are tried; none where nothing works.
    providers: tuple[str, ...]
    local_address: str
    interface: str | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    #: None: no libfabric can be loaded; ``error`` says why.
    library: LibraryInfo | None
    built_in: tuple[str, ...]
    providers: tuple[ProviderInfo, ...]
    choices: tuple[_Choice, ...]
    findings: tuple[Finding, ...]
    error: FabricError | None


def _inspect(peer: str | None) -> _Report:
    from pdx.fabric import library_info
    from pdx.fabric.provider_info import built_in_providers, provider_infos
    from pdx.host.readiness import findings, look
    from pdx.host.topology import read_topology

    topology = read_topology()
    error: FabricError | None = None
    library: LibraryInfo | None = None
    built_in: tuple[str, ...] = ()
    providers: tuple[ProviderInfo, ...] = ()
    choices: list[_Choice] = []
    try:
        library = library_info()
        built_in, providers = built_in_providers(), provider_infos()
        choices.append(_choose(peer or _LOOPBACK, library, topology))
    except FabricError as refusal:
        error = refusal
    return _Report(
        library=library,
        built_in=built_in,
        providers=providers,
        choices=tuple(choices),
        findings=findings(look(), topology, built_in) if library is not None else (),
        error=error,
    )


def _choose(peer: str, library: LibraryInfo, topology: Topology) -> _Choice:
    """What `--fabric auto` comes to: shared memory is offered to loopback peers, tcp to all."""
    from pdx.host.route import route_to
    from pdx.host.shared_memory import shm_lack

    route = route_to(peer)
    lack = shm_lack(library.providers) if route.is_loopback else None
    shm_reaches = route.is_loopback and lack is None
    wanted = (Provider.SHM, Provider.TCP) if shm_reaches else (Provider.TCP,)
    providers = tuple(name for name in wanted if name in library.providers)
    if not providers:
        why = f"this libfabric offers no {' and no '.join(wanted)}"
    elif lack is not None:
        why = f"no shm: {lack}"
    elif route.is_loopback:
        why = "shm where both nodes see one /dev/shm and one PID namespace, else tcp"
    elif route.is_own:
        why = f"the address is this host's own: name {_LOOPBACK} to use shm"
    else:
        why = f"the peer is reached over {route.interface or route.local_address}"
    return _Choice(
        peer=peer,
        providers=providers,
        local_address=route.local_address,
        interface=route.interface,
        why=why + _unused_rdma(topology),
    )


def _unused_rdma(topology: Topology) -> str:
    """RDMA NICs that are here, of providers that no node may choose yet."""
    kinds = {choice.nic.kind.value for group in topology.groups for choice in group.nics}
    unused = sorted(kinds - set(FabricChoice))
    return f"; {' and '.join(unused)} would be faster, no node uses it yet" if unused else ""


def _as_json(report: _Report) -> dict[str, Any]:
    library = report.library
    drives = {} if library is None else library.providers
    return {
        "library": None if library is None else {"path": library.path, "version": library.version},
        "built_in": list(report.built_in),
        "drives": dict(drives),
        "providers": [dataclasses.asdict(each) for each in report.providers],
        "choices": [dataclasses.asdict(each) for each in report.choices],
        "findings": [
            dataclasses.asdict(each) | {"state": each.state.value} for each in report.findings
        ],
        "error": None if report.error is None else report.error.message,
        "hint": None if report.error is None else report.error.hint,
    }


def _as_tables(report: _Report) -> list[Table]:
    if report.library is None:
        return [Table(title="libfabric", rows=(("library", "none can be loaded"),))]
    drives = [
        name if name == theirs else f"{name} (called {theirs})"
        for name, theirs in report.library.providers.items()
    ]
    rows = (
        ("library", report.library.path),
        ("version", report.library.version),
        ("built in", ", ".join(report.built_in)),
        ("pdx drives", ", ".join(drives) or "none of these"),
    )
    tables = [Table(title="libfabric", rows=rows), _limits(report.providers)]
    if report.choices:
        tables.append(_choice_table(report.choices))
    return [*tables, *_finding_tables(report.findings)]


def _limits(providers: tuple[ProviderInfo, ...]) -> Table:
    facts: dict[str, Callable[[ProviderInfo], str]] = {
        "version": lambda each: each.version or "-",
        "domains": lambda each: _few(each.domains),
        "largest write": lambda each: _number(each.max_msg_bytes, "unlimited"),
        "injected write": lambda each: _number(each.inject_bytes),
        "writes in flight": lambda each: _number(each.tx_entries),
        "pieces of a write": lambda each: _number(each.iov_limit),
        "remote pieces": lambda each: _number(each.rma_iov_limit),
        "value with a write": lambda each: _number(each.cq_data_bytes),
        "memory key": lambda each: _number(each.mr_key_bytes),
        "memory mode": lambda each: " ".join(m.removeprefix("FI_MR_") for m in each.mr_mode) or "-",
    }
    rows = [(name, *map(tell, providers)) for name, tell in facts.items()]
    return Table(
        title="Providers for remote writes",
        columns=("", *(each.name for each in providers)),
        rows=tuple(rows),
        note="sizes in bytes; writes in flight are per endpoint",
    )


def _few(names: tuple[str, ...]) -> str:
    """Names of one column: a machine can have 32 of them."""
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} and {len(names) - 1} more"


def _number(value: int | None, none: str = "-") -> str:
    return none if value is None else f"{value:,}"


def _choice_table(choices: tuple[_Choice, ...]) -> Table:
    rows = []
    for each in choices:
        providers = ", else ".join(each.providers) or "nothing"
        rows += [(each.peer, f"{providers}, from {each.local_address}"), ("", each.why)]
    return Table(title="What pdx would choose for a peer", rows=tuple(rows))


def _finding_tables(findings: tuple[Finding, ...]) -> list[Table]:
    rows: list[tuple[str, str, str]] = []
    for each in findings:
        rows.append((each.name, each.state.value, each.found))
        if each.hint:
            rows.append(("", "", f"-> {each.hint}"))
    return [Table(title="What is here, and what is missing", rows=tuple(rows))]
