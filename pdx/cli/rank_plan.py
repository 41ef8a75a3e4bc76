"""What one rank of a node holds, computed from a model's configuration alone. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdx.cli.tables import Table

if TYPE_CHECKING:
    from pdx.checkpoint.model import ModelConfig

__all__ = [
    "GPU_SIZES_GIB",
    "RankPlan",
    "plan_rank",
    "plan_ranks",
    "ranks_table",
    "weights_table",
]

_GIB = 1 << 30
GPU_SIZES_GIB = (24, 48, 80, 141)
_MAX_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One of ``tp_size`` ranks."""

    tp_size: int
    #: Float8 weights as they are stored where ``keeps_float8``, else in the dtype.
    weight_bytes: int
    #: KV of a token over all layers.
    token_bytes: int
    #: KV of a page of one layer: what one write moves between nodes of equal ranks and pages.
    page_bytes: int
    page_size: int

    def tokens_in(self, memory_bytes: int) -> int:
        """KV that a memory holds beside the weights, in tokens; whole pages."""
        left = max(0, memory_bytes - self.weight_bytes)
        return left // (self.token_bytes * self.page_size) * self.page_size


def plan_rank(
    config: ModelConfig,
    *,
    page_size: int,
    dtype: str,
    tp_size: int,
    keeps_float8: bool,
    kv_dtype: str | None = None,
) -> RankPlan:
    """Plan it.

    Args:
        kv_dtype: of the KV cache, where it is not ``dtype``.

    Raises:
        ConfigError: the model cannot be split so, or float8 blocks would be cut that are kept.
    """
    from pdx.checkpoint.float8_split import check_float8_split
    from pdx.checkpoint.weight_sizes import rank_weight_bytes
    from pdx.kv.geometry import ITEMSIZE, kv_layout

    layout = kv_layout(config, page_size, 1, kv_dtype or dtype, tp_size)
    if keeps_float8:
        check_float8_split(config, tp_size)
    return RankPlan(
        tp_size=tp_size,
        weight_bytes=rank_weight_bytes(config, tp_size, ITEMSIZE[dtype], keeps_float8=keeps_float8),
        token_bytes=layout.token_bytes,
        page_bytes=layout.page_bytes,
        page_size=page_size,
    )


def plan_ranks(
    config: ModelConfig, *, page_size: int, dtype: str, kv_dtype: str | None = None
) -> list[RankPlan]:
    """On GPUs: every number of ranks of one host that the model can be split over."""
    from pdx.errors import ConfigError

    plans = []
    for tp_size in range(1, _MAX_RANKS + 1):
        try:
            plan = plan_rank(
                config,
                page_size=page_size,
                dtype=dtype,
                tp_size=tp_size,
                keeps_float8=True,
                kv_dtype=kv_dtype,
            )
        except ConfigError:
            continue
        plans.append(plan)
    return plans


def weights_table(config: ModelConfig) -> Table:
    """Which weights there are, and how ranks share them."""
    from pdx.checkpoint.weight_sizes import weight_groups

    groups = weight_groups(config)
    total = sum(group.num_values for group in groups)
    rows = [
        (group.name, f"{group.num_values:,}", f"{group.num_values / total:.1%}", group.split.value)
        for group in groups
    ]
    return Table(
        title="Weights with --tp", columns=("", "values", "share", "ranks"), rows=tuple(rows)
    )


def ranks_table(plans: list[RankPlan]) -> Table:
    """Which number of ranks fits which GPU."""
    rows = []
    for plan in plans:
        tokens = [plan.tokens_in(gib * _GIB) for gib in GPU_SIZES_GIB]
        rows.append(
            (
                str(plan.tp_size),
                f"{plan.weight_bytes / _GIB:,.1f} GiB",
                f"{plan.token_bytes:,}",
                f"{plan.page_bytes:,}",
                *(f"{count:,}" if count else "-" for count in tokens),
            )
        )
    return Table(
        title="What a rank of --tp holds, and the tokens of KV that fit beside it",
        columns=(
            "ranks",
            "weights",
            "KV of a token",
            "page of a layer",
            *(f"{gib} GiB" for gib in GPU_SIZES_GIB),
        ),
        rows=tuple(rows),
        note="float8 weights as stored; activations and the driver take their share",
    )
