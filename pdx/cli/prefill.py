"""`pdx prefill`: a prefill node."""

from __future__ import annotations

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
    PageSize,
    Poison,
    Threads,
    engine_config,
)
from pdx.cli.output import announce, loading_progress, set_up_logging, status_line
from pdx.cli.serving import bind, check_fabric, report_on_request, run_until_signal

if TYPE_CHECKING:
    from pdx.config.engine import EngineConfig
    from pdx.messenger.handshake import FabricChoice

__all__ = ["prefill"]


def prefill(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            envvar="PDX_MODEL",
            rich_help_panel="Model",
            help="A Hugging Face folder, or org/name[@revision].",
        ),
    ],
    listen: Annotated[
        str,
        typer.Option(
            envvar="PDX_LISTEN",
            rich_help_panel="Fabric",
            help="Control address: HOST:PORT, [IPV6]:PORT or :PORT; port 0 picks a free one.",
        ),
    ] = "127.0.0.1:0",
    fabric: FabricName = "auto",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    page_size: PageSize = 16,
    pages: NumPages = 0,
    kv_memory: KvMemory = "1G",
    poison: Poison = False,
    chunk: ChunkLen = 512,
    max_seqs: MaxSeqs = 64,
    log_level: LogLevel = "warning",
) -> None:
    """Run prompts for decoders and write their KV cache across while computing."""
    set_up_logging(log_level)
    config = engine_config(
        device=device,
        dtype=dtype,
        threads=threads,
        page_size=page_size,
        pages=pages,
        kv_memory=kv_memory,
        poison=poison,
        chunk=chunk,
        max_seqs=max_seqs,
    )
    choice = check_fabric(fabric)
    run_until_signal(lambda: _serve(model, listen, cast("FabricChoice", choice), config))


async def _serve(model: str, listen: str, fabric: FabricChoice, config: EngineConfig) -> None:
    from pdx.config.model_source import model_is_folder, resolve_model
    from pdx.engine.loading import load_model
    from pdx.engine.prefill_node import PrefillNode
    from pdx.messenger.control import parse_address

    # Before the model is loaded: a port that is taken should not cost a minute. Decoders that
    # connect meanwhile wait in the backlog.
    listener = bind(parse_address(listen))
    folder = resolve_model(model)
    # A folder is announced by its absolute path: a decoder on this host may run elsewhere.
    name = str(folder) if model_is_folder(model) else model
    with loading_progress(model) as progress:
        loaded = await load_model(folder, config, progress)
    try:
        node = PrefillNode(loaded, model_name=name, listener=listener, fabric=fabric)
        try:
            bound = await node.start()
            layout = loaded.layout
            report_on_request(node.status)
            status_line(
                f"serving {model} ({loaded.config.dtype}, {layout.num_pages} pages of "
                f"{layout.page_size} tokens), loaded in {loaded.load_s:.1f} s; for a decoder:"
            )
            announce(f"pdx decode --peer {bound}")
            await node.run()
        finally:
            await node.stop("the prefiller shuts down")
    finally:
        await loaded.close()
