"""Requests' rules on their logits, in place: bias, penalties, tokens that are held back.

Specification: ``kernels/reference/logit_rules``. A row's listed tokens are distinct, so a program
changes each once and nothing needs an order; rows without rules cost a load.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["RuleTensors", "apply_rules"]

_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTensors:
    """The rules of N rows, on the device. Row n's tokens are ``starts[n] .. starts[n + 1]``."""

    #: int32 [N + 1].
    starts: Tensor
    #: int32 [R], distinct within a row and within the vocabulary.
    token_ids: Tensor
    #: float32 [R].
    bias: Tensor
    #: int32 [R]: times in the output; -1: only in the prompt; -2: in neither.
    counts: Tensor
    #: bool [R]: cannot be drawn yet.
    held: Tensor
    #: float32 [N] each: repetition, presence and frequency penalty.
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


def apply_rules(logits: Tensor, rules: RuleTensors) -> Tensor:
    """Change logits float32 [N, V] where they lie, and give them back.

    Args:
        logits: rows of any distance, elements side by side. Log-probabilities are of what they
            were before.
        rules: of the rows.
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    if len(logits):
        _kernel[(len(logits),)](
            logits,
            rules.starts,
            rules.token_ids,
            rules.bias,
            rules.counts,
            rules.held,
            rules.repetition,
            rules.presence,
            rules.frequency,
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
    counts_ptr,
    held_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    stride_l,
    BLOCK: tl.constexpr,
):
    LARGEST: tl.constexpr = 3.4028234663852886e38
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetition_ptr + row)
    presence, frequency = tl.load(presence_ptr + row), tl.load(frequency_ptr + row)
    stop = tl.load(starts_ptr + row + 1)
    for first in range(tl.load(starts_ptr + row), stop, BLOCK):
        place = first + tl.arange(0, BLOCK)
        is_rule = place < stop
        token = tl.load(token_ids_ptr + place, mask=is_rule, other=0)
        count = tl.load(counts_ptr + place, mask=is_rule, other=-2)
        held = tl.load(held_ptr + place, mask=is_rule, other=0).to(tl.int32)
        to = logits_ptr + row * stride_l + token
        value = tl.load(to, mask=is_rule, other=0.0)
        value += tl.load(bias_ptr + place, mask=is_rule, other=0.0)
        if repetition != 1:
            penalised = tl.where(value > 0, value / repetition, value * repetition)
            # A penalty close to zero must not make an infinite logit: nothing can be drawn by it.
            penalised = tl.minimum(tl.maximum(penalised, -LARGEST), LARGEST)
            value = tl.where(count >= -1, penalised, value)
        value = tl.where(count > 0, value - (presence + frequency * count), value)
        tl.store(to, tl.where(held != 0, float("-inf"), value), mask=is_rule)
