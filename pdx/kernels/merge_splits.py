"""Put together the attention of parts of a context: out = sum_s 2^(lse_s - lse) out_s.

lse is the logarithm (base 2) of the sum of a row's exponentials. Attention over disjoint parts
merges in any grouping (Milakov and Gimelshein 2018; Dao et al., Flash-Decoding, 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.attention_tiles import next_power_of_2
from pdx.kernels.batch import RequestGroup

__all__ = ["Splits", "merge_splits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Where a split kernel leaves its parts: by request and row of it, head, split.

    A part is written whole or not at all; ``lse`` is always written, and -inf says "not at all".
    """

    #: float32 [B * max_rows, Hq, num_splits, D].
    parts: Tensor
    #: float32 [B * max_rows, Hq, num_splits].
    lse: Tensor

    @classmethod
    def empty(cls, group: RequestGroup, num_heads: int, num_splits: int, width: int) -> Splits:
        """Memory for one launch."""
        shape = (len(group) * group.max_query_len, num_heads, num_splits)
        device = group.query_starts.device
        return cls(
            parts=torch.empty((*shape, width), dtype=torch.float32, device=device),
            lse=torch.empty(shape, dtype=torch.float32, device=device),
        )


def merge_splits(splits: Splits, group: RequestGroup, out: Tensor) -> None:
    """Write the requests' rows of out [T, Hq, D]; other rows stay."""
    _, num_heads, num_splits, width = splits.parts.shape
    _kernel[(len(group) * group.max_query_len, num_heads)](
        splits.parts,
        splits.lse,
        out,
        group.query_starts,
        group.query_lens,
        out.stride(0),
        out.stride(1),
        MAX_ROWS=group.max_query_len,
        NUM_SPLITS=num_splits,
        BLOCK_S=next_power_of_2(num_splits),
        WIDTH=width,
        BLOCK_D=next_power_of_2(width),
        num_warps=4,
    )


@triton.jit
def _kernel(
    parts_ptr,
    lse_ptr,
    out_ptr,
    row_starts_ptr,
    num_rows_ptr,
    stride_ot,
    stride_oh,
    MAX_ROWS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    place, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    request, row = place // MAX_ROWS, place % MAX_ROWS
    if row >= tl.load(num_rows_ptr + request):
        return
    splits = tl.arange(0, BLOCK_S)
    columns = tl.arange(0, BLOCK_D)
    first = (place.to(tl.int64) * num_heads + head) * NUM_SPLITS
    lse = tl.load(lse_ptr + first + splits, mask=splits < NUM_SPLITS, other=float("-inf"))
    written = lse > float("-inf")
    largest = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights, 0)
    parts = tl.load(
        parts_ptr + (first + splits)[:, None] * WIDTH + columns[None, :],
        mask=written[:, None] & (columns < WIDTH)[None, :],
        other=0.0,
    )
    merged = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out = out_ptr + (tl.load(row_starts_ptr + request) + row).to(tl.int64) * stride_ot
    tl.store(
        out + head * stride_oh + columns,
        merged.to(out_ptr.dtype.element_ty),
        mask=columns < WIDTH,
    )
