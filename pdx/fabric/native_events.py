"""The core's events in Python's words. Runs on whoever calls events()."""

from __future__ import annotations

import ctypes
import enum
from ctypes import c_void_p
from typing import Any, TypeVar, assert_never

import numpy as np
from numpy.typing import NDArray

from pdx.fabric.interface import (
    Arrived,
    FabricEvent,
    Fenced,
    LinkDown,
    LinkUp,
    Surplus,
    TransferDone,
)
from pdx.fabric.native_library import EventStruct, core

__all__ = ["event_of"]

_Number = TypeVar("_Number", np.int64, np.uint32)


class _Kind(enum.IntEnum):
    """EventKind of native/events.hpp."""

    LINK_UP = 1
    LINK_DOWN = 2
    FENCED = 3
    TRANSFER_DONE = 4
    ARRIVED = 5
    SURPLUS = 6


def event_of(event: EventStruct) -> FabricEvent:
    """The event; its arrays are copied, and the core's freed."""
    link, slot, generation = event.link, event.slot, event.generation
    kind = _Kind(event.kind)
    match kind:
        case _Kind.LINK_UP:
            return LinkUp(link=link)
        case _Kind.LINK_DOWN:
            reason = event.reason.decode(errors="replace")
            return LinkDown(link=link, code=event.code, reason=reason)
        case _Kind.FENCED:
            return Fenced(link=link)
        case _Kind.TRANSFER_DONE:
            return TransferDone(
                transfer=event.transfer,
                link=link,
                slot=slot,
                generation=generation,
                posted_atoms=event.atoms,
                failed_atoms=event.failed_atoms,
                cancelled=bool(event.cancelled),
                code=event.code,
                first_post_ns=event.first_post_ns or None,
                last_progress_ns=event.last_progress_ns or None,
            )
        case _Kind.ARRIVED:
            return Arrived(
                link=link,
                slot=slot,
                generation=generation,
                atoms=event.atoms,
                arrival_ns=_taken(event.arrival_ns, event.num_arrivals, np.int64),
                arrival_atoms=_taken(event.arrival_atoms, event.num_arrivals, np.uint32),
            )
        case _Kind.SURPLUS:
            return Surplus(link=link, slot=slot, generation=generation, count=event.atoms)
    assert_never(kind)


def _taken(pointer: Any, count: int, dtype: type[_Number]) -> NDArray[_Number]:
    """An array of the core's, copied and given back."""
    if not count:
        return np.empty(0, dtype)
    copy = np.ctypeslib.as_array(pointer, (count,)).astype(dtype)
    core().pdx_fabric_free(ctypes.cast(pointer, c_void_p))
    return copy
