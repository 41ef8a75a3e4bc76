"""A node's settings, resolved once and never changed. Every field says its unit; the CLI's help is
made from these.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdx.errors import ConfigError

__all__ = ["EngineConfig", "parse_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What a node's ranks and scheduler need."""

    #: Device of the ranks.
    device: str = "cpu"
    #: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
    dtype: str = "auto"
    #: Tokens in a KV page.
    page_size: int = 16
    #: KV pages; None: as many as kv_memory_bytes holds.
    num_pages: int | None = None
    #: Memory for KV pages, bytes.
    kv_memory_bytes: int = 1 << 30
    #: Prefill tokens in one forward pass.
    chunk_len: int = 512
    #: Requests that hold pages at once.
    max_num_seqs: int = 64
    #: Output tokens for which pages are leased when a request is admitted.
    reserve_output_len: int = 256
    #: Threads of a rank; 0 leaves the choice to torch.
    num_threads: int = 0
    #: A forward pass that takes longer than this is a hang; the node stops. Seconds.
    watchdog_s: float = 300.0
    #: Fill fresh KV memory with NaN (test builds).
    poison: bool = False

    def __post_init__(self) -> None:
        for name in ("page_size", "chunk_len", "max_num_seqs", "reserve_output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_pages is not None and self.num_pages < 1:
            raise ConfigError(f"num_pages must be at least 1, not {self.num_pages}")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(
                f"dtype {self.dtype!r} is not known", hint="use auto, float32, bfloat16 or float16"
            )


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str) -> int:
    """Parse a size such as ``512M``, ``1.5G`` or ``1GiB`` (powers of two).

    Raises:
        ConfigError: the text is not a size.
    """
    cleaned = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = cleaned[-1:] if cleaned[-1:] in _UNITS else ""
    try:
        value = float(cleaned.removesuffix(unit) if unit else cleaned)
    except ValueError:
        value = -1.0
    if value <= 0:
        raise ConfigError(f"{text!r} is not a size", hint="write for example 512M or 4G")
    return int(value * _UNITS[unit])
