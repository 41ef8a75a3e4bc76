"""`pdx decode`: a decode node with an OpenAI-compatible API."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pdx.cli.options import CheckOption, with_settings
from pdx.cli.output import status_line
from pdx.config.engine import EngineConfig
from pdx.config.node import (
    DrainConfig,
    FabricConfig,
    ModelChoice,
    RecoveryConfig,
    ServerConfig,
    TraceConfig,
)
from pdx.config.providers import FabricChoice
from pdx.config.resolve import Settings
from pdx.config.setting import Setting, pick
from pdx.errors import ConfigError

if TYPE_CHECKING:
    from pdx.cli.serving import DrainRequest

__all__ = ["DECODE_SETTINGS", "decode"]


def _from_prefiller(each: Setting) -> Setting:
    return dataclasses.replace(each, default=None, unset="the prefiller's")


DECODE_SETTINGS = [
    *pick(FabricConfig, without=["listen"], required=["peers"]),
    *pick(RecoveryConfig),
    *map(_from_prefiller, pick(ModelChoice)),
    *(_from_prefiller(s) if s.name == "page_size" else s for s in pick(EngineConfig)),
    *pick(ServerConfig),
    *pick(DrainConfig),
    *pick(TraceConfig),
]


@with_settings(DECODE_SETTINGS)
def decode(settings: Settings, check: CheckOption = False) -> None:
    """Serve an OpenAI-compatible API; prompts run on the prefiller, tokens are generated here."""
    from pdx.cli.deployment import check_deployment
    from pdx.cli.serving import run_until_signal

    if check:
        check_deployment(settings)
        return
    run_until_signal(lambda request: _serve(settings, request))


async def _serve(settings: Settings, drain: DrainRequest) -> None:
    from pdx.checkpoint.model_source import model_is_folder
    from pdx.cli.loading_view import loading_progress
    from pdx.cli.serving import (
        bind,
        faults,
        report_on_request,
        run_until_drained,
        say_ready,
        tracing,
        url_of,
    )
    from pdx.engine.decode_node import DecodeNode
    from pdx.engine.loading import load_model
    from pdx.engine.node_report import Reporter
    from pdx.engine.peer import describe_with_patience
    from pdx.fabric.start_check import check_fabric
    from pdx.host.worker_core import worker_core
    from pdx.messenger.control import Address, parse_address
    from pdx.process.secret import shared_secret

    fabric_cpu = worker_core(settings["fabric_core"], device=settings["device"])
    server, patience_s = settings.build(ServerConfig), settings["peer_timeout_s"]
    peers = [parse_address(peer) for peer in settings["peers"]]
    http = parse_address(server.http)
    # Before a prefiller is waited for and the model is loaded. A supervisor has looked by itself,
    # and a node that it starts again may find the old one's frontend still leaving the port.
    if not Reporter(os.environ).is_heard:
        bind(http).close()
    secret = shared_secret(settings)
    opener, _ = faults()
    # Now, not when the first peer is there: without a fabric nothing could come.
    check_fabric(settings["fabric"], settings["fabric_bind"])
    async with contextlib.AsyncExitStack() as closing:
        # So does the trace: what it is refused for should not cost a minute.
        trace = closing.enter_context(tracing(settings["trace"], "decoder"))
        described = await describe_with_patience(
            peers, timeout_s=patience_s, on_wait=status_line, secret=secret
        )
        config = settings.build(
            EngineConfig,
            dtype=described.dtype if settings["dtype"] == "auto" else settings["dtype"],
            page_size=settings["page_size"] or described.page_size,
        )
        folder = _model_folder(settings["model"], described.model)
        with loading_progress(folder.name) as progress:
            loaded = await load_model(folder, config, progress)
        closing.push_async_callback(loaded.close)
        name = server.served_model_name or settings["model"] or described.model
        node = DecodeNode(
            loaded,
            model_name=folder.name if model_is_folder(name) else name,
            peers=peers,
            local_below=settings["local_below"],
            recovery=settings.build(RecoveryConfig),
            fabric=FabricChoice(settings["fabric"]),
            fabric_cpu=fabric_cpu,
            fabric_bind=settings["fabric_bind"],
            secret=secret,
            opener=opener,
            trace=trace,
        )
        closing.push_async_callback(node.stop, "the decoder shuts down")
        await node.prefillers.connect_any(patience_s, status_line)
        report_on_request(lambda: node.status().counts)
        ready = await node.start_frontend(server)
        status_line(f"{node.prefillers.status}, loaded in {loaded.load_s:.1f} s")
        bound = Address(host=ready.host, port=ready.port)
        say_ready(bound, url_of(bound), what="the API")
        await run_until_drained(node, drain, settings["drain_timeout_s"])


def _model_folder(asked: str | None, described: str) -> Path:
    """The model's folder here: what the user asked for, else what the prefiller serves."""
    from pdx.checkpoint.model_source import resolve_model

    if asked is not None:
        return resolve_model(asked)
    if Path(described).is_absolute() and not Path(described).is_dir():
        raise ConfigError(
            f"the prefiller serves {described}, which is no folder on this host",
            hint="name the model's folder here with --model",
        )
    return resolve_model(described)
