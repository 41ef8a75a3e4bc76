"""How a model is split over ranks: which part of a parameter a rank holds, and how ranks sum up.

Column-parallel layers hold rows of the weight and give a part of the output; row-parallel ones hold
columns, and their outputs are summed (Shoeybi et al. 2019, "Megatron-LM", section 3). So a layer
sums twice: after attention and after the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdx.kv.layout import kv_heads_of_rank

__all__ = ["LoneRank", "Shard", "TpGroup", "even_shard", "kv_shard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Rows (or columns) ``start <= i < stop`` of a stored tensor that has ``whole`` of them."""

    dim: int
    start: int
    stop: int
    whole: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class TpGroup(Protocol):
    """The ranks of a node, which run every pass together and call these in the same order."""

    @property
    def rank(self) -> int:
        """This one's place; 0 leads."""

    @property
    def size(self) -> int:
        """How many there are."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, on all of them; ``x`` may be overwritten."""

    def concat(self, x: Tensor, sizes: list[int]) -> Tensor:
        """All ranks' ``x`` side by side in the last dimension, on all of them.

        Args:
            sizes: of each rank's last dimension.
        """

    def from_leader(self, values: Tensor) -> Tensor:
        """The leader's values, on all ranks; other ranks' are of the same shape and dtype."""


class LoneRank:
    """A group of one."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def concat(self, x: Tensor, sizes: list[int]) -> Tensor:
        return x

    def from_leader(self, values: Tensor) -> Tensor:
        return values


def even_shard(size: int, tp: TpGroup, rank: int | None = None, *, dim: int = 0) -> Shard:
    """The part of a rank (this one's, unless named) when ``size`` rows are split evenly."""
    place = tp.rank if rank is None else rank
    start, stop = size * place // tp.size, size * (place + 1) // tp.size
    return Shard(dim=dim, start=start, stop=stop, whole=size)


def kv_shard(num_kv_heads: int, head_dim: int, tp: TpGroup) -> Shard:
    """This rank's rows of the K or V projection; ranks above the number of heads share them."""
    heads = kv_heads_of_rank(num_kv_heads, tp.size, tp.rank)
    start, stop = heads.start * head_dim, heads.stop * head_dim
    return Shard(dim=0, start=start, stop=stop, whole=num_kv_heads * head_dim)
