"""Whether float8 weights may be split over so many ranks where they are kept as they are. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pdx.checkpoint.model import ModelConfig
from pdx.errors import ConfigError

__all__ = ["check_float8_split"]


def check_float8_split(config: ModelConfig, tp_size: int) -> None:
    """A GPU's kernels read whole blocks; a CPU dequantises, so that any cut will do.

    Raises:
        ConfigError: a rank's part would begin within a block; what is cut is named.
    """
    blocks = config.quantization
    if blocks is None:
        return
    cut = [
        f"{what} ({whole:,})"
        for what, whole, num_parts in _split(config, tp_size)
        if whole % num_parts
        or any(whole // num_parts % block for block in (blocks.num_rows, blocks.num_columns))
    ]
    if tp_size > 1 and cut:
        raise ConfigError(
            f"{tp_size} ranks would cut float8 blocks of {blocks.num_rows} x {blocks.num_columns}: "
            + ", ".join(cut),
            hint="use fewer ranks, or --device cpu, which dequantises the weights",
        )


def _split(config: ModelConfig, tp_size: int) -> Iterator[tuple[str, int, int]]:
    """Rows and columns of the layers' matrices that ranks share out, and into how many parts."""
    heads, experts = config.num_heads, config.experts
    yield "queries", heads * config.head_dim, tp_size
    if config.mla is None:
        num_parts = min(tp_size, config.num_kv_heads)
        yield "keys and values", config.num_kv_heads * config.head_dim, num_parts
    else:
        yield "keys and values", heads * (config.mla.nope_dim + config.mla.v_dim), tp_size
        yield "values of all heads", heads * config.mla.v_dim, tp_size
    if experts is None or len(experts.layers) < config.num_layers:
        yield "MLPs", config.intermediate_size, tp_size
    if experts is not None:
        yield "experts", experts.inner_size, tp_size
        if experts.shared_inner_size:
            yield "shared experts", experts.shared_inner_size, tp_size
