"""The highest logits of rows and their ids, highest first; of equals the lower id comes first."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["likeliest"]


def likeliest(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """float32 [N, V] and 1 to V -> logits [N, num] and ids int64 [N, num]."""
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    return values[:, :num], ids[:, :num]
