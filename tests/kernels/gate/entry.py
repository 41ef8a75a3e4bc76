"""What an entry of the gate is, and tensors without memory to call ops with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["ARCHS", "BF16", "STREAM", "Entry", "meta"]

ARCHS = (80, 90, 100)
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One call, and what the machine code of its first launch must contain."""

    name: str
    call: Callable[[], object]
    archs: tuple[int, ...] = ARCHS
    #: Kinds of instructions by architecture; see `machine_code`.
    needs: dict[int, tuple[str, ...]] = field(default_factory=dict)


#: What streams: no matrix unit, 16 bytes a thread and load.
STREAM = dict.fromkeys(ARCHS, ("wide_load",))


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor that has everything but memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
