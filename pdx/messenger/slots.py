"""Slots of the imm space: which (slot, generation) pair names which transfer. Owned by the
decoder's event loop.

An imm has 12 bits of slot and 12 of generation. Slots are given out first in, first out with a part
always kept free, so that a pair comes back only after ``num_free_kept * 2^12`` transfers at the
earliest: long after the link of a late write with the same pair would have been fenced.
"""

from __future__ import annotations

from collections import deque

__all__ = ["NUM_SLOTS", "SlotTable"]

#: Slots 1 to NUM_SLOTS - 1 are for transfers; slot 0 is for probes.
NUM_SLOTS = 1 << 12
_NUM_GENERATIONS = 1 << 12
_NUM_FREE_KEPT = 256


class SlotTable:
    """Hands out pairs. A simulation gives smaller sizes, so that wrap-around happens."""

    def __init__(
        self,
        *,
        num_slots: int = NUM_SLOTS,
        num_generations: int = _NUM_GENERATIONS,
        num_free_kept: int = _NUM_FREE_KEPT,
    ) -> None:
        assert 0 <= num_free_kept < num_slots - 1
        self._free: deque[int] = deque(range(1, num_slots))
        self._generation = [0] * num_slots
        self._taken: set[int] = set()
        self._num_generations = num_generations
        self._num_free_kept = num_free_kept

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    @property
    def any_free(self) -> bool:
        """:meth:`take` would give one."""
        return len(self._free) > self._num_free_kept

    def take(self) -> tuple[int, int] | None:
        """A slot and its generation; None while too few are free."""
        if not self.any_free:
            return None
        slot = self._free.popleft()
        self._taken.add(slot)
        return slot, self._generation[slot]

    def give_back(self, slot: int) -> None:
        """The pair is over; the slot's next user has another generation."""
        self._taken.remove(slot)
        self._generation[slot] = (self._generation[slot] + 1) % self._num_generations
        self._free.append(slot)
