"""`pdx serve`: prefill and decode nodes of one machine under one supervisor, or one colocated
node.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdx.cli.options import with_settings
from pdx.cli.output import announce, status_line
from pdx.config.engine import EngineConfig
from pdx.config.node import (
    DrainConfig,
    FabricConfig,
    ModelChoice,
    RecoveryConfig,
    RestartConfig,
    ServerConfig,
    TraceConfig,
)
from pdx.config.resolve import Settings
from pdx.config.setting import pick
from pdx.errors import ConfigError

if TYPE_CHECKING:
    from pdx.cli.serving import DrainRequest
    from pdx.engine.launcher import NodeSpec
    from pdx.messenger.control import Address

__all__ = ["serve"]

_NODES = "Nodes"


@with_settings(
    [
        *pick(ModelChoice, required=["model"]),
        *pick(EngineConfig),
        *pick(FabricConfig, "fabric", "peer_timeout_s", "local_below"),
        *pick(RecoveryConfig),
        *pick(ServerConfig),
        *pick(DrainConfig),
        *pick(RestartConfig),
        *pick(TraceConfig),
    ],
    argument="model",
)
def serve(
    settings: Settings,
    prefill: Annotated[
        int, typer.Option(min=1, metavar="NODES", rich_help_panel=_NODES, help="Prefill nodes.")
    ] = 1,
    decode: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="NODES",
            rich_help_panel=_NODES,
            help="Decode nodes. Each has an API of its own, on consecutive ports.",
        ),
    ] = 1,
    colocated: Annotated[
        bool,
        typer.Option(
            "--colocated", rich_help_panel=_NODES, help="One node for both phases, no fabric."
        ),
    ] = False,
) -> None:
    """Serve a model on this machine: prefill and decode nodes, an OpenAI-compatible API.

    Settings of the engine hold for each node: two nodes take --kv-memory twice. A node that
    ends is started again (--restarts). Ctrl-C stops all.
    """
    from pdx.cli.serving import run_until_signal

    if colocated and max(prefill, decode) > 1:
        raise ConfigError("--colocated is one node, --prefill or --decode asks for more")
    if colocated:
        run_until_signal(lambda request: _serve_colocated(settings, request))
    else:
        run_until_signal(lambda request: _serve_nodes(settings, prefill, decode, request))


async def _serve_nodes(
    settings: Settings, num_prefillers: int, num_decoders: int, drain: DrainRequest
) -> None:
    from pdx.checkpoint.model_source import resolve_model
    from pdx.cli.loading_view import NodesView
    from pdx.cli.model_check import check_nodes
    from pdx.cli.serving import bind, url_of
    from pdx.engine.local_launcher import LocalLauncher
    from pdx.engine.restarts import RestartPolicy
    from pdx.engine.supervisor import Supervisor
    from pdx.engine.tasks import run_until_one_ends
    from pdx.messenger.control import parse_address

    http = parse_address(settings["http"])
    apis = [_nth(http, i) for i in range(num_decoders)]
    # Before anything is started: a port that is taken, a wrong name, a download.
    for api in apis:
        bind(api).close()
    decoders = _names("decode", num_decoders)
    _check_traces(settings["trace"], decoders)
    folder = resolve_model(settings["model"])
    check_nodes(folder, settings.build(EngineConfig), num_prefillers + num_decoders)
    view = NodesView()
    policy = RestartPolicy(most=settings["restarts"])
    supervisor = Supervisor(LocalLauncher(), policy, view.on_event, view.on_note)
    try:
        async with view.starting():
            peers = await supervisor.start(_prefillers(settings, num_prefillers))
            bound = await supervisor.start(_decoders(settings, decoders, apis, peers))
        urls = [url_of(parse_address(address)) for address in bound]
        _announce(settings["model"], urls)
        await run_until_one_ends(supervisor.run(), drain.wait())
        timeout_s: float = settings["drain_timeout_s"]
        status_line(f"finishing what runs ({timeout_s:g} s at most); SIGTERM again ends it")
        await supervisor.drain(timeout_s)
    finally:
        status_line("stopping; Ctrl-C again ends all at once")
        await supervisor.stop()


def _announce(model: str, urls: list[str]) -> None:
    """URLs for programs on stdout; what they are, for people, on stderr. Somebody who sees both on
    one terminal needs them once.
    """
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        for url in urls:
            announce(url)
    status_line(f"{model} is served at {' and '.join(urls)}; Ctrl-C stops it")


def _prefillers(settings: Settings, count: int) -> list[NodeSpec]:
    from pdx.engine.launcher import NodeSpec

    return [
        NodeSpec(
            name=name,
            role="prefill",
            arguments=("prefill",),
            env=_common_env(settings),
            address_variable="PDX_LISTEN",
            stage=0,
        )
        for name in _names("prefill", count)
    ]


def _decoders(
    settings: Settings, names: list[str], apis: list[Address], peers: list[str]
) -> list[NodeSpec]:
    from pdx.engine.launcher import NodeSpec

    specs = []
    traces = _traces(settings["trace"], names)
    for name, api in zip(names, apis, strict=True):
        own = {"PDX_PEER": ",".join(peers), "PDX_HTTP": str(api)}
        if traces:
            own["PDX_TRACE"] = traces[name]
        specs.append(
            NodeSpec(
                name=name,
                role="decode",
                arguments=("decode",),
                env=_common_env(settings) | own,
                address_variable="PDX_HTTP",
                stage=1,
            )
        )
    return specs


def _names(role: str, count: int) -> list[str]:
    return [role] if count == 1 else [f"{role}-{i}" for i in range(1, count + 1)]


def _common_env(settings: Settings) -> dict[str, str | None]:
    """All that was resolved here, and nothing that nodes would look up elsewhere."""
    return settings.to_env() | {"PDX_CONFIG": None, "PDX_PEER": None, "PDX_LISTEN": None}


def _nth(http: Address, i: int) -> Address:
    """The i-th decoder's address; a free port stays one."""
    from pdx.messenger.control import Address

    return Address(host=http.host, port=http.port + i if http.port else 0)


def _traces(file: str | None, names: list[str]) -> dict[str, str]:
    """Each decoder's trace: the file, or where there are several, one beside it."""
    if file is None or len(names) == 1:
        return {} if file is None else {names[0]: file}
    path = Path(file)
    return {name: str(path.with_name(f"{path.stem}-{name}{path.suffix}")) for name in names}


def _check_traces(file: str | None, names: list[str]) -> None:
    """Before minutes of loading.

    Raises:
        OutputError: a trace cannot be written.
    """
    from pdx.cli.serving import tracing

    for name, own in _traces(file, names).items():
        if not Path(own).expanduser().is_fifo():  # its reader would take this for the whole trace
            with tracing(own, name):
                pass


async def _serve_colocated(settings: Settings, drain: DrainRequest) -> None:
    from pdx.checkpoint.model_source import model_is_folder, resolve_model
    from pdx.cli.loading_view import loading_progress
    from pdx.cli.serving import bind, report_on_request, run_until_drained, tracing, url_of
    from pdx.engine.colocated_node import ColocatedNode
    from pdx.engine.loading import load_model
    from pdx.messenger.control import Address, parse_address

    server = settings.build(ServerConfig)
    bind(parse_address(server.http)).close()  # before the model is loaded
    folder = resolve_model(settings["model"])
    name = server.served_model_name or settings["model"]
    async with contextlib.AsyncExitStack() as closing:
        trace = closing.enter_context(tracing(settings["trace"], "colocated node"))
        with loading_progress(folder.name, first_s=0.0) as progress:
            loaded = await load_model(folder, settings.build(EngineConfig), progress)
        closing.push_async_callback(loaded.close)
        node = ColocatedNode(
            loaded,
            model_name=folder.name if model_is_folder(name) else name,
            trace=trace,
        )
        closing.push_async_callback(node.stop)
        report_on_request(lambda: node.status().counts)
        ready = await node.start_frontend(server)
        status_line(f"one colocated node, loaded in {loaded.load_s:.1f} s")
        bound = Address(host=ready.host, port=ready.port)
        _announce(settings["model"], [url_of(bound)])
        await run_until_drained(node, drain, settings["drain_timeout_s"])
