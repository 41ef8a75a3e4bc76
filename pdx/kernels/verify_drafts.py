"""Which tokens of a pass with drafts stand, on the device: behind ``sampling.sample``.

Specification: ``kernels/reference/verify_drafts``. A program has a request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.attention_tiles import next_power_of_2

__all__ = ["verify_drafts"]


def verify_drafts(
    tokens: Tensor, drafts: Tensor, row_starts: Tensor, num_drafts: Tensor, max_drafts: int
) -> Tensor:
    """How many of each request's tokens stand: int32 [B], 1 to its drafts + 1.

    Args:
        tokens: int64 [T], drawn from every row of the pass (-1: broken logits, no draft is that).
        drafts: int64 [T]: the token fed behind each row; where there is none, not read.
        row_starts: int32 [B]: a request's first row.
        num_drafts: int32 [B]; a request has one row more. Below 0: padding of a captured graph,
            of which 0 tokens stand.
        max_drafts: at least the largest of them; fixed in a captured graph.
    """
    num_standing = torch.empty_like(num_drafts)
    if len(num_drafts):
        block = next_power_of_2(max_drafts + 1)
        rows = row_starts, num_drafts
        _kernel[(len(num_drafts),)](tokens, drafts, *rows, num_standing, BLOCK=block, num_warps=1)
    return num_standing


@triton.jit
def _kernel(
    tokens_ptr, drafts_ptr, row_starts_ptr, num_drafts_ptr, standing_ptr, BLOCK: tl.constexpr
):
    request = tl.program_id(0)
    start = tl.load(row_starts_ptr + request).to(tl.int64)
    num_drafts = tl.load(num_drafts_ptr + request)
    place = tl.arange(0, BLOCK)
    is_draft = place < num_drafts
    token = tl.load(tokens_ptr + start + place, mask=is_draft, other=0)
    draft = tl.load(drafts_ptr + start + place, mask=is_draft, other=0)
    first_wrong = tl.min(tl.where(token != draft, place, num_drafts), 0)
    tl.store(standing_ptr + request, tl.minimum(first_wrong, num_drafts) + 1)
