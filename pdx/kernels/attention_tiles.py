"""What the attention kernels share: where a tile's tokens lie, and a step of the online softmax.

Scores are kept in base 2 (the scale holds log2 e), sums and outputs in float32. A row that has seen
no key has the maximum -inf and the sum 0; its output is 0, never NaN, and no finite number stands
in for -inf, which a valid score could undercut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl

__all__ = [
    "LOG2_E",
    "ScoreScale",
    "capped",
    "finish",
    "next_power_of_2",
    "softmax_step",
    "split_range",
    "tile_pages",
    "token_offsets",
]

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class ScoreScale:
    """The two factors between a dot product and a score in base 2."""

    factor: float
    cap: float

    @classmethod
    def of(cls, scale: float, soft_cap: float | None) -> ScoreScale:
        """``soft_cap * tanh(scale * dot / soft_cap)``; without a cap, ``scale * dot``."""
        if soft_cap is None:
            return cls(scale * LOG2_E, 0.0)
        return cls(2 * scale / soft_cap * LOG2_E, soft_cap * LOG2_E)


def next_power_of_2(number: int) -> int:
    """The smallest power of 2 that is not below ``number``, which is positive."""
    return 1 << (number - 1).bit_length()


@triton.jit
def capped(dots, factor, cap, HAS_CAP: tl.constexpr):
    """Dot products as scores. tanh x = 1 - 2 / (e^2x + 1), which no large x turns into inf/inf."""
    scores = dots * factor
    if HAS_CAP:
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    return scores


@triton.jit
def softmax_step(scores, values, row_max, row_sum, acc):
    """Take a tile in: scores [M, N], masked with -inf; values [N, D]; the state of the M rows."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def finish(row_sum, acc):
    """The rows' outputs."""
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]


@triton.jit
def split_range(begin, context_len, split, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """First token and stop of one part of a context from ``begin`` on: whole tiles, an equal number
    for each part. The last parts of a short context are empty.
    """
    tiles_per_split = tl.cdiv(tl.cdiv(context_len - begin, BLOCK_N), NUM_SPLITS)
    first = begin + split * tiles_per_split * BLOCK_N
    return first, tl.minimum(first + tiles_per_split * BLOCK_N, context_len)


@triton.jit
def tile_pages(table_ptr, first, stop, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of the tile at token ``first``: one where tiles divide pages, else one a token.

    Kernels ask for the next tile's before they use this tile's: loads that wait for a load of the
    same iteration would leave the pipeline one buffer. Past ``stop`` it is page 0, never read.
    """
    if PAGE_SIZE % BLOCK_N == 0:
        pages = tl.load(table_ptr + first // PAGE_SIZE, mask=first < stop, other=0)
    else:
        tokens = first + tl.arange(0, BLOCK_N)
        pages = tl.load(table_ptr + tokens // PAGE_SIZE, mask=tokens < stop, other=0)
    return pages


@triton.jit
def token_offsets(
    pages, first, stride_page, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr
):
    """Offsets [N] of the tile's tokens, ``WIDTH`` elements each, in a [P, ..., S, WIDTH] memory.

    64 bits from the page on: a cache has more than 2^31 elements.
    """
    places = first % PAGE_SIZE + tl.arange(0, BLOCK_N)
    if PAGE_SIZE % BLOCK_N != 0:
        places = places % PAGE_SIZE
    return pages.to(tl.int64) * stride_page + places * WIDTH
