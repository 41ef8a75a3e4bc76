"""What requests change in their logits before tokens are drawn, written as sparse lists.

For each listed token of a row, in this order: the bias is added; the repetition penalty divides a
positive and multiplies a negative logit of a token that is in prompt or output; the cost of being
in the output is taken off; -inf where it is held back. Sources: Keskar et al. 2019, "CTRL"
(repetition); OpenAI's API reference (presence and frequency).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_rules"]

_FLOAT32 = torch.finfo(torch.float32)


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
        logits: of N rows.
        starts: int32 [N + 1]: row n's tokens are ``starts[n] .. starts[n + 1]``.
        token_ids: int32 [R], distinct within a row.
        bias: float32 [R].
        seen: bool [R].
        cost: float32 [R].
        held: bool [R].
        repetition: float64 [N]; 1 changes nothing.
    """
    bounds = starts.tolist()
    for row, penalty, begin, end in zip(logits, repetition, bounds[:-1], bounds[1:], strict=True):
        if begin == end:
            continue
        ids, listed = token_ids[begin:end].long(), slice(begin, end)
        values = row[ids] + bias[listed]
        wide = values.to(torch.float64)
        wide = torch.where(wide > 0, wide / penalty, wide * penalty)
        wide = wide.clamp(_FLOAT32.min, _FLOAT32.max)
        values = torch.where(seen[listed] & (penalty != 1), wide.to(torch.float32), values)
        row[ids] = (values - cost[listed]).masked_fill(held[listed], float("-inf"))
    return logits
