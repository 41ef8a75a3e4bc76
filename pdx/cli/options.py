"""Options that several commands share, and how they become a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pdx.config.engine import EngineConfig

__all__ = [
    "ChunkLen",
    "Device",
    "Dtype",
    "FabricName",
    "KvMemory",
    "LogLevel",
    "MaxSeqs",
    "NumPages",
    "PageSize",
    "Poison",
    "Threads",
    "engine_config",
]

_MODEL, _KV, _SCHEDULER, _FABRIC, _OUTPUT = "Model", "KV cache", "Scheduler", "Fabric", "Output"

Device = Annotated[
    str,
    typer.Option(
        "--device", envvar="PDX_DEVICE", rich_help_panel=_MODEL, help="Device of the ranks."
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        envvar="PDX_DTYPE",
        rich_help_panel=_MODEL,
        help="auto (the checkpoint's), float32, bfloat16 or float16.",
    ),
]
Threads = Annotated[
    int,
    typer.Option(
        "--threads",
        min=0,
        envvar="PDX_THREADS",
        rich_help_panel=_MODEL,
        help="CPU threads of the rank; 0 leaves the choice to torch.",
    ),
]
PageSize = Annotated[
    int,
    typer.Option(
        "--page-size",
        min=1,
        envvar="PDX_PAGE_SIZE",
        rich_help_panel=_KV,
        help="Tokens in a KV page.",
    ),
]
NumPages = Annotated[
    int,
    typer.Option(
        "--pages",
        min=0,
        envvar="PDX_PAGES",
        rich_help_panel=_KV,
        help="KV pages; 0: as many as --kv-memory holds.",
    ),
]
KvMemory = Annotated[
    str,
    typer.Option(
        "--kv-memory",
        envvar="PDX_KV_MEMORY",
        rich_help_panel=_KV,
        help="Memory for KV pages, e.g. 512M.",
    ),
]
Poison = Annotated[
    bool,
    typer.Option(
        "--poison",
        envvar="PDX_POISON",
        rich_help_panel=_KV,
        help="Fill fresh KV memory with NaN (tests).",
    ),
]
ChunkLen = Annotated[
    int,
    typer.Option(
        "--chunk",
        min=1,
        envvar="PDX_CHUNK",
        rich_help_panel=_SCHEDULER,
        help="Prefill tokens in one forward pass.",
    ),
]
MaxSeqs = Annotated[
    int,
    typer.Option(
        "--max-seqs",
        min=1,
        envvar="PDX_MAX_SEQS",
        rich_help_panel=_SCHEDULER,
        help="Requests that hold pages at once.",
    ),
]
FabricName = Annotated[
    str,
    typer.Option(
        "--fabric",
        envvar="PDX_FABRIC",
        rich_help_panel=_FABRIC,
        help="auto (shm on one host, else tcp), tcp or shm.",
    ),
]
LogLevel = Annotated[
    str,
    typer.Option(
        "--log-level",
        envvar="PDX_LOG_LEVEL",
        rich_help_panel=_OUTPUT,
        help="debug, info, warning or error.",
    ),
]


def engine_config(
    *,
    device: str,
    dtype: str,
    threads: int,
    page_size: int,
    pages: int,
    kv_memory: str,
    poison: bool,
    chunk: int,
    max_seqs: int,
) -> EngineConfig:
    """The engine's settings from the flags.

    Raises:
        ConfigError: a flag's value makes no sense.
    """
    from pdx.config.engine import EngineConfig, parse_bytes

    return EngineConfig(
        device=device,
        dtype=dtype,
        num_threads=threads,
        page_size=page_size,
        num_pages=pages or None,
        kv_memory_bytes=parse_bytes(kv_memory),
        poison=poison,
        chunk_len=chunk,
        max_num_seqs=max_seqs,
    )
