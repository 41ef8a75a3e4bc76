"""What is measured: one launch on one shape, and whoever computes the same in another way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["Absent", "Call", "Case", "Maker"]

Call = Callable[[], Tensor]
#: Lays out its own inputs, and gives the call that is timed.
Maker = Callable[[], Call]


class Absent(Exception):
    """Why a library is not measured: it is not installed, or has nothing for the shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A launch and its work. Tensors live as long as the case: drop one before the next."""

    op: str
    shape: str
    #: To and from memory, each byte once; multiplications and additions.
    num_bytes: int
    flops: int
    ours: Call
    #: Other libraries' calls. Each raises :class:`Absent` where it cannot be measured.
    others: Mapping[str, Maker] = field(default_factory=dict)
    #: How far results may be apart, of their norm; None: others do like work on other numbers.
    tolerance: float | None = None
