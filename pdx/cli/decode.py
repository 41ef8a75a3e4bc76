"""`pdx decode`: a decode node with an OpenAI-compatible API."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from pdx.cli.options import (
    ChunkLen,
    Device,
    Dtype,
    FabricName,
    KvMemory,
    LogLevel,
    MaxSeqs,
    NumPages,
    Poison,
    Threads,
    engine_config,
)
from pdx.cli.output import announce, loading_progress, set_up_logging, status_line
from pdx.cli.serving import check_fabric, report_on_request, run_until_signal
from pdx.errors import ConfigError

if TYPE_CHECKING:
    from pdx.config.engine import EngineConfig
    from pdx.messenger.handshake import FabricChoice

__all__ = ["decode"]


def decode(
    peer: Annotated[
        str,
        typer.Option(
            envvar="PDX_PEER",
            rich_help_panel="Fabric",
            help="Control address of the prefiller, as it printed it.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            envvar="PDX_MODEL",
            rich_help_panel="Model",
            help="A Hugging Face folder, or org/name[@revision]; the prefiller's if not given.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            envvar="PDX_SERVED_MODEL_NAME",
            rich_help_panel="Server",
            help="The model's name in the API; by default the folder's or hub name.",
        ),
    ] = None,
    http: Annotated[
        str,
        typer.Option(
            envvar="PDX_HTTP",
            rich_help_panel="Server",
            help="Address of the HTTP API; port 0 picks a free one.",
        ),
    ] = "127.0.0.1:0",
    max_streams: Annotated[
        int,
        typer.Option(
            min=1,
            envvar="PDX_MAX_STREAMS",
            rich_help_panel="Server",
            help="Requests at once, waiting ones included; more get a 503.",
        ),
    ] = 1024,
    peer_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            envvar="PDX_PEER_TIMEOUT",
            rich_help_panel="Fabric",
            help="How long to wait for the prefiller at the start, seconds.",
        ),
    ] = 60.0,
    fabric: FabricName = "auto",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    page_size: Annotated[
        int,
        typer.Option(
            "--page-size",
            min=0,
            envvar="PDX_PAGE_SIZE",
            rich_help_panel="KV cache",
            help="Tokens in a KV page; 0: the prefiller's.",
        ),
    ] = 0,
    pages: NumPages = 0,
    kv_memory: KvMemory = "1G",
    poison: Poison = False,
    chunk: ChunkLen = 512,
    max_seqs: MaxSeqs = 64,
    log_level: LogLevel = "warning",
) -> None:
    """Serve an OpenAI-compatible API; prompts run on the prefiller, tokens are generated here."""
    set_up_logging(log_level)
    config = engine_config(
        device=device,
        dtype=dtype,
        threads=threads,
        page_size=page_size or 1,
        pages=pages,
        kv_memory=kv_memory,
        poison=poison,
        chunk=chunk,
        max_seqs=max_seqs,
    )
    settings = _Settings(
        peer=peer,
        model=model,
        served_model_name=served_model_name,
        http=http,
        max_streams=max_streams,
        peer_timeout_s=peer_timeout,
        fabric=cast("FabricChoice", check_fabric(fabric)),
        page_size=page_size or None,
    )
    run_until_signal(lambda: _serve(settings, config))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    peer: str
    model: str | None
    served_model_name: str | None
    http: str
    max_streams: int
    peer_timeout_s: float
    fabric: FabricChoice
    page_size: int | None


async def _serve(settings: _Settings, config: EngineConfig) -> None:
    from pdx.config.model_source import model_is_folder
    from pdx.engine.decode_node import DecodeNode
    from pdx.engine.loading import load_model
    from pdx.engine.peer import describe_with_patience
    from pdx.messenger.control import Address, parse_address

    peer, http = parse_address(settings.peer), parse_address(settings.http)
    description = await describe_with_patience(
        peer, timeout_s=settings.peer_timeout_s, on_wait=status_line
    )
    config = dataclasses.replace(
        config,
        dtype=description.dtype if config.dtype == "auto" else config.dtype,
        page_size=settings.page_size or description.page_size,
    )
    folder = _model_folder(settings.model, description.model)
    with loading_progress(folder.name) as progress:
        loaded = await load_model(folder, config, progress)
    try:
        name = settings.served_model_name or settings.model or description.model
        node = DecodeNode(
            loaded,
            model_name=folder.name if model_is_folder(name) else name,
            peer=peer,
            fabric=settings.fabric,
        )
        try:
            await node.connector.connect_patiently(settings.peer_timeout_s, status_line)
            report_on_request(lambda: node.status().counts)
            ready = await node.start_frontend(http, max_streams=settings.max_streams)
            status_line(f"{node.connector.status}, loaded in {loaded.load_s:.1f} s; the API:")
            announce(f"http://{Address(host=ready.host, port=ready.port)}/v1")
            await node.run()
        finally:
            await node.stop("the decoder shuts down")
    finally:
        await loaded.close()


def _model_folder(asked: str | None, described: str) -> Path:
    """The model's folder here: what the user asked for, else what the prefiller serves."""
    from pdx.config.model_source import resolve_model

    if asked is not None:
        return resolve_model(asked)
    if Path(described).is_absolute() and not Path(described).is_dir():
        raise ConfigError(
            f"the prefiller serves {described}, which is no folder on this host",
            hint="name the model's folder here with --model",
        )
    return resolve_model(described)
