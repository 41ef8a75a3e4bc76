"""What a request changes in its logits before a token is drawn, written as a sparse list.

For each listed token, in this order: the bias is added; the repetition penalty divides a positive
and multiplies a negative logit of a token that is in the prompt or output; the presence penalty is
taken where the token is in the output, the frequency penalty for each time; -inf where it is held
back. Sources: Keskar et al. 2019, "CTRL" (repetition); OpenAI's API reference (the other two).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["apply_rules"]

_FLOAT32 = torch.finfo(torch.float32)


def apply_rules(
    row: Tensor,
    rules: Iterable[tuple[int, float, bool, int, bool]],
    repetition: float,
    presence: float,
    frequency: float,
) -> Tensor:
    """Logits [V] -> a changed copy.

    Args:
        rules: token id, bias, whether it is in prompt or output, how often it is in the output,
            whether it is held back; an id at most once.
        repetition: 1 changes nothing.
        presence: 0 changes nothing.
        frequency: 0 changes nothing.
    """
    row = row.clone()
    for token, bias, is_seen, count, is_held in rules:
        value = float(row[token] + torch.tensor(bias, dtype=row.dtype))
        if is_seen and repetition != 1:
            value = value / repetition if value > 0 else value * repetition
            value = min(max(value, _FLOAT32.min), _FLOAT32.max)
        if count:
            value -= presence + frequency * count
        row[token] = float("-inf") if is_held else value
    return row
