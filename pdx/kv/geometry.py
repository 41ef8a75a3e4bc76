"""From a model and a page size to its KV memory's layout. No torch: rank and primary share it."""

from __future__ import annotations

from pdx.config.model import ModelConfig
from pdx.errors import ConfigError
from pdx.kv.layout import KvLayout

__all__ = ["ITEMSIZE", "kv_layout", "num_pages_in"]

#: Bytes of one value, by dtype name.
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def kv_layout(config: ModelConfig, page_size: int, num_pages: int, dtype: str) -> KvLayout:
    """The layout of ``num_pages`` pages (each one spans all layers).

    Raises:
        ConfigError: a number is not positive, or the dtype is unknown.
    """
    if dtype not in ITEMSIZE:
        raise ConfigError(f"dtype {dtype!r} is unknown", hint=f"one of {', '.join(ITEMSIZE)}")
    if page_size <= 0:
        raise ConfigError(f"page size {page_size} is not positive")
    if num_pages <= 0:
        raise ConfigError(f"{num_pages} KV pages are too few", hint="give the KV cache more memory")
    return KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        num_pages=num_pages,
        itemsize=ITEMSIZE[dtype],
    )


def num_pages_in(config: ModelConfig, page_size: int, memory_bytes: int, dtype: str) -> int:
    """How many pages (of all layers) ``memory_bytes`` hold; 0 where not even one fits."""
    return memory_bytes // kv_layout(config, page_size, 1, dtype).total_bytes
