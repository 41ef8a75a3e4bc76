"""Requests' rules on their logits, in place: bias, penalties, tokens that are held back.

Specification: ``kernels/reference/logit_rules``. A row's listed tokens are distinct, so a program
changes each once and nothing needs an order; rows without rules cost a load. Every operation is
rounded as the host's is, so that a token drawn here is the one drawn there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["apply_rules"]

_BLOCK = 1024


def apply_rules(
    logits: Tensor,
    starts: Tensor,
    token_ids: Tensor,
    bias: Tensor,
    seen: Tensor,
    cost: Tensor,
    held: Tensor,
    repetition: Tensor,
) -> Tensor:
    """Change logits float32 [N, V] where they lie, and give them back.

    Args:
        logits: rows of any distance, elements side by side.
        starts: int32 [N + 1]: row n's tokens are ``starts[n] .. starts[n + 1]``.
        token_ids: int32 [R], distinct within a row and within the vocabulary.
        bias: float32 [R], added first.
        seen: bool [R]: in prompt or output, where the repetition penalty counts.
        cost: float32 [R]: the other penalties, taken off.
        held: bool [R]: cannot be drawn yet.
        repetition: float64 [N]; 1 changes nothing.
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    if len(logits):
        _kernel[(len(logits),)](
            logits,
            starts,
            token_ids,
            bias,
            seen,
            cost,
            held,
            repetition,
            logits.stride(0),
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return logits


@triton.jit
def _kernel(
    logits_ptr,
    starts_ptr,
    token_ids_ptr,
    bias_ptr,
    seen_ptr,
    cost_ptr,
    held_ptr,
    repetition_ptr,
    stride_l,
    BLOCK: tl.constexpr,
):
    LARGEST: tl.constexpr = 3.4028234663852886e38
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetition_ptr + row)
    stop = tl.load(starts_ptr + row + 1)
    for first in range(tl.load(starts_ptr + row), stop, BLOCK):
        place = first + tl.arange(0, BLOCK)
        is_rule = place < stop
        token = tl.load(token_ids_ptr + place, mask=is_rule, other=0)
        held = tl.load(held_ptr + place, mask=is_rule, other=0).to(tl.int32)
        to = logits_ptr + row * stride_l + token
        value = tl.load(to, mask=is_rule, other=0.0)
        value += tl.load(bias_ptr + place, mask=is_rule, other=0.0)
        if repetition != 1:
            seen = tl.load(seen_ptr + place, mask=is_rule, other=0).to(tl.int32)
            wide = value.to(tl.float64)
            wide = tl.where(wide > 0, wide / repetition, wide * repetition)
            # A penalty close to zero must not make an infinite logit: nothing can be drawn by it.
            wide = tl.minimum(tl.maximum(wide, -LARGEST), LARGEST)
            value = tl.where(seen != 0, wide.to(tl.float32), value)
        value -= tl.load(cost_ptr + place, mask=is_rule, other=0.0)
        tl.store(to, tl.where(held != 0, float("-inf"), value), mask=is_rule)
