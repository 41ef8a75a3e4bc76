"""The dtype in which the reference adds up. Ranks and tests."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["widen"]


def widen(x: Tensor) -> Tensor:
    """``x`` in float32; float64 stays, so that a test can compare with more digits."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)
