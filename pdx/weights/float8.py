"""Values of float8 weights, of which only the wanted part is made. The rank's main thread."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from pdx.checkpoint.quantization import Float8Blocks

__all__ = ["dequantised"]


def dequantised(
    stored: Tensor, scales: Tensor, source: tuple[slice, ...], blocks: Float8Blocks
) -> Tensor:
    """``stored[source]`` times its blocks' scales, float32. A part may begin within a block.

    Args:
        stored: float8 [..., O, I].
        scales: [..., blocks of O, blocks of I].
        source: of the leading dimensions; the others are taken whole.
    """
    whole = (*source, *[slice(None)] * (stored.ndim - len(source)))
    rows = _block_of_each(stored.shape[-2], whole[-2], blocks.num_rows)
    columns = _block_of_each(stored.shape[-1], whole[-1], blocks.num_columns)
    of_part = scales[whole[:-2]].to(torch.float32)[..., columns]
    values = stored[source].to(torch.float32)
    # Block row by block row, in place: a scale for each value would be as large as the values.
    begin = 0
    for block, num_rows in sorted(Counter(rows.tolist()).items()):
        values[..., begin : begin + num_rows, :] *= of_part[..., block, None, :]
        begin += num_rows
    return values


def _block_of_each(size: int, part: slice, block_size: int) -> Tensor:
    """For each index of a part of a dimension, the block that it lies in."""
    return torch.arange(size)[part] // block_size
