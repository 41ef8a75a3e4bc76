"""The receiving side's count: which (slot, generation) pairs are armed, and how much came. Pure.

    free ──expect──> armed ──release──> free
                       └──fence──> disarmed ──release──> free

Only an armed pair is credited. Everything else is stale: dropped, and remembered by nobody but a
counter, so that no immediate is ever credited to a transfer it does not belong to. Early ones
(before expect) and late ones (after release, after the fence, of an older generation) are both
stale. More than expected is a surplus.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pdx.errors import FabricError
from pdx.fabric.interface import Arrived, FabricEvent, Surplus
from pdx.lab.simulated_fabric.imm import Imm, ImmLayout

__all__ = ["SlotTable"]

_MAX_ARRIVALS = 256


class _State(enum.Enum):
    FREE = enum.auto()
    ARMED = enum.auto()
    DISARMED = enum.auto()


@dataclass(slots=True)
class _Slot:
    state: _State = _State.FREE
    generation: int = 0
    link: int = 0
    expected: int = 0
    count: int = 0
    arrived: bool = False
    surplus: bool = False
    arrivals: list[tuple[int, int]] = field(default_factory=list)


class SlotTable:
    """All slots of one fabric. ``tell`` gets Arrived and Surplus as they happen."""

    def __init__(self, layout: ImmLayout, tell: Callable[[FabricEvent], None]) -> None:
        self._layout = layout
        self._tell = tell
        self._slots: dict[int, _Slot] = {}

    def check(self, slot: int, generation: int) -> None:
        """Refuse what an immediate cannot carry."""
        slots, generations = self._layout.max_slot, self._layout.max_generation
        if not 1 <= slot <= slots or not 0 <= generation <= generations:
            raise FabricError(
                f"slot {slot} generation {generation} is out of range: slots are 1 to {slots}, "
                f"generations 0 to {generations}"
            )

    def expect(self, link: int, index: int, generation: int, atoms: int) -> None:
        """Arm a pair."""
        slot = self._slots.get(index)
        if slot is not None and slot.state is _State.ARMED:
            raise FabricError(f"slot {index} generation {slot.generation} is armed already")
        slot = _Slot(state=_State.ARMED, generation=generation, link=link, expected=atoms)
        self._slots[index] = slot
        self._settle(slot, index)

    def retarget(self, index: int, generation: int, atoms: int) -> None:
        """Wait for another count."""
        slot = self._armed(index, generation)
        slot.expected = atoms
        if slot.state is _State.ARMED:
            self._settle(slot, index)

    def count(self, index: int, generation: int) -> int:
        """Atoms so far."""
        return self._armed(index, generation).count

    def release(self, index: int, generation: int) -> int:
        """Stop counting; returns the count."""
        slot = self._armed(index, generation)
        slot.state = _State.FREE
        return slot.count

    def disarm_link(self, link: int) -> None:
        """The link ends: its slots count no more, and still answer release()."""
        for slot in self._slots.values():
            if slot.state is _State.ARMED and slot.link == link:
                slot.state = _State.DISARMED

    def credit(self, imm: Imm, now_ns: int) -> bool:
        """One immediate came. False: it is stale."""
        slot = self._slots.get(imm.slot)
        if slot is None or slot.state is not _State.ARMED or slot.generation != imm.generation:
            return False
        slot.count += imm.atoms
        if slot.arrivals and slot.arrivals[-1][0] == now_ns:
            slot.arrivals[-1] = (now_ns, slot.count)
        else:
            if len(slot.arrivals) == _MAX_ARRIVALS:
                # The later of each pair stays: a thinned log may say "later", never "earlier".
                slot.arrivals = slot.arrivals[1::2]
            slot.arrivals.append((now_ns, slot.count))
        self._settle(slot, imm.slot)
        return True

    def _armed(self, index: int, generation: int) -> _Slot:
        slot = self._slots.get(index)
        if slot is None or slot.state is _State.FREE or slot.generation != generation:
            raise FabricError(f"slot {index} generation {generation} is not armed")
        return slot

    def _settle(self, slot: _Slot, index: int) -> None:
        if slot.count > slot.expected and not slot.surplus:
            slot.surplus = True
            self._tell(
                Surplus(link=slot.link, slot=index, generation=slot.generation, count=slot.count)
            )
        if slot.count == slot.expected and not slot.arrived:
            slot.arrived = True
            self._tell(
                Arrived(
                    link=slot.link,
                    slot=index,
                    generation=slot.generation,
                    atoms=slot.count,
                    arrival_ns=np.array([at for at, _ in slot.arrivals], np.int64),
                    arrival_atoms=np.array([count for _, count in slot.arrivals], np.uint32),
                )
            )
