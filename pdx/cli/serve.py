"""`pdx serve`: prefill and decode nodes of one machine under one supervisor, or one colocated
node.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdx.cli.options import with_settings
from pdx.cli.output import announce, loading_progress, node_line, status_line
from pdx.config.engine import EngineConfig
from pdx.config.node import (
    DrainConfig,
    FabricConfig,
    ModelChoice,
    RecoveryConfig,
    ServerConfig,
    TraceConfig,
)
from pdx.config.resolve import Settings
from pdx.config.setting import pick
from pdx.errors import ConfigError

if TYPE_CHECKING:
    from pdx.cli.serving import DrainRequest
    from pdx.engine.supervisor import Supervisor
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

    Settings of the engine hold for each node: two nodes take --kv-memory twice. Ctrl-C stops all.
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
    from pdx.cli.serving import bind
    from pdx.config.model_source import resolve_model
    from pdx.engine.supervisor import Supervisor
    from pdx.messenger.control import parse_address

    http = parse_address(settings["http"])
    apis = [_nth(http, i) for i in range(num_decoders)]
    # Before anything is started: a port that is taken, a wrong name, a download.
    for api in apis:
        bind(api).close()
    resolve_model(settings["model"])
    env = settings.to_env() | {"PDX_CONFIG": None, "PDX_PEER": None, "PDX_LISTEN": None}
    supervisor = Supervisor(node_line)
    try:
        peers = []
        for i in range(1, num_prefillers + 1):
            name = "prefill" if num_prefillers == 1 else f"prefill-{i}"
            line = await supervisor.start(name, ["prefill"], env, stage=0)
            node_line(name, line)
            peers.append(shlex.split(line)[3])  # pdx decode --peer ADDRESS
        for i, api in enumerate(apis, 1):
            name = "decode" if num_decoders == 1 else f"decode-{i}"
            own = {"PDX_PEER": ",".join(peers), "PDX_HTTP": str(api)}
            if settings["trace"] is not None and num_decoders > 1:
                own["PDX_TRACE"] = _of_its_own(settings["trace"], name)
            url = await supervisor.start(name, ["decode"], env | own, stage=1)
            announce(url)
        status_line(f"{settings['model']} is served; Ctrl-C stops it")
        await _until_failure_or_drain(supervisor, drain)
        timeout_s: float = settings["drain_timeout_s"]
        status_line(f"finishing what runs ({timeout_s:g} s at most); SIGTERM again ends it")
        await supervisor.drain(timeout_s)
    finally:
        status_line("stopping; Ctrl-C again ends all at once")
        await supervisor.stop()


async def _until_failure_or_drain(supervisor: Supervisor, drain: DrainRequest) -> None:
    """Raises when a node ends, returns when the end is asked for."""
    failure = asyncio.create_task(supervisor.failure())
    asked = asyncio.create_task(drain.wait())
    try:
        await asyncio.wait([failure, asked], return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            raise failure.result()
    finally:
        failure.cancel()
        asked.cancel()


def _nth(http: Address, i: int) -> Address:
    """The i-th decoder's address; a free port stays one."""
    from pdx.messenger.control import Address

    return Address(host=http.host, port=http.port + i if http.port else 0)


def _of_its_own(file: str, name: str) -> str:
    """A file beside this one, for one of several nodes."""
    path = Path(file)
    return str(path.with_name(f"{path.stem}-{name}{path.suffix}"))


async def _serve_colocated(settings: Settings, drain: DrainRequest) -> None:
    from pdx.cli.serving import report_on_request, run_until_drained, tracing
    from pdx.config.model_source import model_is_folder, resolve_model
    from pdx.engine.colocated_node import ColocatedNode
    from pdx.engine.loading import load_model
    from pdx.messenger.control import Address, parse_address

    server = settings.build(ServerConfig)
    parse_address(server.http)
    folder = resolve_model(settings["model"])
    with loading_progress(folder.name) as progress:
        loaded = await load_model(folder, settings.build(EngineConfig), progress)
    name = server.served_model_name or settings["model"]
    async with contextlib.AsyncExitStack() as closing:
        closing.push_async_callback(loaded.close)
        node = ColocatedNode(
            loaded,
            model_name=folder.name if model_is_folder(name) else name,
            trace=closing.enter_context(tracing(settings["trace"], "colocated node")),
        )
        closing.push_async_callback(node.stop)
        report_on_request(lambda: node.status().counts)
        ready = await node.start_frontend(server)
        status_line(f"one colocated node, loaded in {loaded.load_s:.1f} s; the API:")
        announce(f"http://{Address(host=ready.host, port=ready.port)}/v1")
        await run_until_drained(node, drain, settings["drain_timeout_s"])
