"""The immediate that comes with a write: slot, generation, atoms - 1. Pure.

The widths are a parameter so that a short simulation can wrap slots and generations, which takes
2^20 transfers with the real ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Imm", "ImmLayout"]

_ATOMS_BITS = 8


class Imm(NamedTuple):
    """What one immediate says."""

    slot: int
    generation: int
    atoms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImmLayout:
    """Widths of the fields, in bits. The defaults are the native fabric's."""

    slot_bits: int = 12
    generation_bits: int = 12

    @property
    def max_slot(self) -> int:
        """Slots are 1 to this."""
        return (1 << self.slot_bits) - 1

    @property
    def max_generation(self) -> int:
        """Generations are 0 to this."""
        return (1 << self.generation_bits) - 1

    @property
    def max_atoms(self) -> int:
        """Atoms that one write may carry."""
        return 1 << _ATOMS_BITS

    def encode(self, imm: Imm) -> int:
        """The number on the wire."""
        slot, generation, atoms = imm
        assert 1 <= slot <= self.max_slot
        assert 0 <= generation <= self.max_generation
        assert 1 <= atoms <= self.max_atoms
        return (slot << self.generation_bits | generation) << _ATOMS_BITS | (atoms - 1)

    def decode(self, data: int) -> Imm:
        """What encode() was given."""
        pair = data >> _ATOMS_BITS
        generation = pair & self.max_generation
        return Imm(pair >> self.generation_bits, generation, (data & (self.max_atoms - 1)) + 1)
