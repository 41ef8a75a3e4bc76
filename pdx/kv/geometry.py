"""From a model and a page size to its KV memory's layout. No torch: rank and primary share it."""

from __future__ import annotations

import mmap

from pdx.checkpoint.model import ModelConfig
from pdx.errors import ConfigError
from pdx.kv.layout import KvLayout, NodeLayout, kv_heads_of_rank

__all__ = ["ITEMSIZE", "check_tp_size", "kv_layout", "node_layout", "num_pages_in", "num_pages_of"]

#: Bytes of one value in KV memory, by the name of its type. A latent's record in float8 has values
#: of several types and is counted in bytes.
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


def check_tp_size(config: ModelConfig, tp_size: int) -> None:
    """Whether a model can be split over so many ranks.

    Raises:
        ConfigError: naming what does not divide.
    """
    heads, kv_heads = config.num_heads, config.num_kv_heads
    fits = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    ]
    if tp_size not in fits:
        kv = "" if config.mla is not None else f" and {kv_heads} KV heads"
        raise ConfigError(
            f"{heads} attention heads{kv} cannot be split over {tp_size} ranks",
            hint=f"use --tp {', '.join(map(str, fits))}",
        )
    experts = config.experts
    sizes = {
        "vocab_size": config.vocab_size,
        "intermediate_size": config.intermediate_size,
        "an expert's size": tp_size if experts is None else experts.inner_size,
    }
    for name, size in sizes.items():
        if size < tp_size:
            raise ConfigError(
                f"{name} of {size} cannot be split over {tp_size} ranks",
                hint=f"use --tp {', '.join(str(n) for n in fits if n <= size)}",
            )


def kv_layout(
    config: ModelConfig,
    page_size: int,
    num_pages: int,
    dtype: str,
    tp_size: int = 1,
    *,
    drafts: bool = False,
) -> KvLayout:
    """The layout of ``num_pages`` pages on each of a node's ranks. A page spans all layers of its
    group.

    Args:
        drafts: whether the layers that draft have KV too, behind the others'.

    Raises:
        ConfigError: a number is not positive, the dtype is unknown, or the ranks do not divide the
            model.
    """
    if dtype not in ITEMSIZE:
        raise ConfigError(f"dtype {dtype!r} is unknown", hint=f"one of {', '.join(ITEMSIZE)}")
    if page_size <= 0:
        raise ConfigError(f"page size {page_size} is not positive")
    if num_pages <= 0:
        raise ConfigError(f"{num_pages} KV pages are too few", hint="give the KV cache more memory")
    check_tp_size(config, tp_size)
    num_parts, part_dim = config.kv_parts
    if dtype == "float8" and config.mla is not None:
        part_dim = config.mla.float8_record_bytes
    [group] = config.layer_groups(drafts=drafts)
    return KvLayout(
        group=group.name,
        num_layers=len(group.layers),
        num_draft_layers=config.num_draft_layers if drafts else 0,
        num_kv_heads=len(kv_heads_of_rank(config.num_kv_heads, tp_size, 0)),
        head_dim=part_dim,
        page_size=page_size,
        num_pages=num_pages,
        itemsize=ITEMSIZE[dtype],
        num_parts=num_parts,
    )


def node_layout(
    config: ModelConfig,
    page_size: int,
    num_pages: int,
    dtype: str,
    tp_size: int,
    alignment: int = mmap.PAGESIZE,
    *,
    drafts: bool = False,
) -> NodeLayout:
    """The layout of all ranks of a node. Raises as :func:`kv_layout` does."""
    rank = kv_layout(config, page_size, num_pages, dtype, tp_size, drafts=drafts)
    return NodeLayout(
        rank=rank, tp_size=tp_size, num_kv_heads=config.num_kv_heads, alignment=alignment
    )


def num_pages_in(
    config: ModelConfig,
    page_size: int,
    memory_bytes: int,
    dtype: str,
    tp_size: int = 1,
    *,
    drafts: bool = False,
) -> int:
    """How many pages ``memory_bytes`` of a rank hold; 0 where not even one fits."""
    page = kv_layout(config, page_size, 1, dtype, tp_size, drafts=drafts)
    return memory_bytes // page.total_bytes


def num_pages_of(
    config: ModelConfig,
    page_size: int,
    num_pages: int | None,
    memory_bytes: int,
    dtype: str,
    tp_size: int = 1,
    *,
    drafts: bool = False,
) -> int:
    """``num_pages``, else how many ``memory_bytes`` of a rank hold.

    Raises:
        ConfigError: not even one fits.
    """
    if num_pages is not None:
        return num_pages
    held = num_pages_in(config, page_size, memory_bytes, dtype, tp_size, drafts=drafts)
    if not held:
        raise ConfigError(
            f"{memory_bytes:,} bytes of KV memory hold no page of {page_size:,} tokens",
            hint="give the KV cache more memory (--kv-memory), or use smaller pages (--page-size)",
        )
    return held
