"""Sorts (token, expert) pairs by expert on the device, in blocks of rows that have one expert each.

Sizes are bounds that the host knows from shapes alone, so a captured graph stays right whatever the
router says; blocks past the last one are marked unused. Counting first, then placing by a running
sum: no atomics, the same order every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.attention_tiles import next_power_of_2

__all__ = ["ExpertOrder", "expert_order"]

#: Pairs that a program looks at together.
_SCAN = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOrder:
    """Rows of a launch over experts: block b is of expert ``block_experts[b]``."""

    #: int32 [blocks * block_m]: pairs t K + k in rising order within an expert; -1: padding. Rows
    #: of unused blocks are not written.
    pairs: Tensor
    #: int32 [blocks]; -1: unused, as are all after it.
    block_experts: Tensor
    block_m: int

    @property
    def num_blocks(self) -> int:
        """Unused ones too."""
        return len(self.block_experts)


def expert_order(ids: Tensor, num_experts: int, block_m: int) -> ExpertOrder:
    """The order of a pass.

    Args:
        ids: int [T, K], T K > 0; an expert outside 0 <= e < E leaves its pair out.
        num_experts: E.
        block_m: rows of a block, a power of 2.
    """
    num_pairs, device = ids.numel(), ids.device
    # Each of the experts that are used has one block that is not full, at most.
    most_used = min(num_experts, num_pairs)
    num_blocks = most_used + (num_pairs - most_used) // block_m
    order = ExpertOrder(
        pairs=torch.empty(num_blocks * block_m, dtype=torch.int32, device=device),
        block_experts=torch.empty(num_blocks, dtype=torch.int32, device=device),
        block_m=block_m,
    )
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    ids = ids.contiguous()
    scan = min(_SCAN, next_power_of_2(num_pairs))
    _count_kernel[(num_experts,)](ids, counts, num_pairs, SCAN=scan, num_warps=4)
    _place_kernel[(num_experts,)](
        ids,
        counts,
        order.pairs,
        order.block_experts,
        num_pairs,
        num_blocks,
        NUM_EXPERTS=num_experts,
        BLOCK_E=next_power_of_2(num_experts),
        BLOCK_M=block_m,
        SCAN=scan,
        num_warps=4,
    )
    return order


@triton.jit
def _count_kernel(ids_ptr, counts_ptr, num_pairs, SCAN: tl.constexpr):
    expert = tl.program_id(0)
    count = tl.zeros((SCAN,), tl.int32)
    for first in range(0, num_pairs, SCAN):
        pair = first + tl.arange(0, SCAN)
        count += (tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(count, 0))


@triton.jit
def _place_kernel(
    ids_ptr,
    counts_ptr,
    pairs_ptr,
    block_experts_ptr,
    num_pairs,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SCAN: tl.constexpr,
):
    expert = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    count = tl.sum(tl.where(experts == expert, counts, 0), 0)
    own_blocks = (count + BLOCK_M - 1) // BLOCK_M
    first_block = tl.sum(tl.where(experts < expert, blocks, 0), 0)

    lanes = tl.arange(0, SCAN)
    for first in range(0, own_blocks, SCAN):
        is_own = first + lanes < own_blocks
        tl.store(block_experts_ptr + first_block + first + lanes, expert, mask=is_own)
    if expert == NUM_EXPERTS - 1:
        for first in range(first_block + own_blocks, num_blocks, SCAN):
            tl.store(block_experts_ptr + first + lanes, -1, mask=first + lanes < num_blocks)

    rows_ptr = pairs_ptr + first_block * BLOCK_M
    pad = count + tl.arange(0, BLOCK_M)
    tl.store(rows_ptr + pad, -1, mask=pad < own_blocks * BLOCK_M)
    if count > 0:
        placed = 0
        for first in range(0, num_pairs, SCAN):
            pair = first + lanes
            is_own = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1) == expert
            place = placed + tl.cumsum(is_own.to(tl.int32), 0) - 1
            tl.store(rows_ptr + place, pair, mask=is_own)
            placed += tl.sum(is_own.to(tl.int32), 0)
