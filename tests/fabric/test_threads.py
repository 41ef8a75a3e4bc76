"""A fabric's methods are called from several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from pdx.errors import FabricError
from pdx.fabric import Arrived, FabricEvent, NativeFabric, open_fabric
from pdx.fabric.native_library import check, core

NUM_ROUNDS, NUM_SLOTS = 40, 500


@contextmanager
def opened() -> Iterator[tuple[NativeFabric, int]]:
    """A fabric and a link of its."""
    memory = np.zeros(4096, np.uint8)
    fabric = open_fabric(provider="tcp")
    assert isinstance(fabric, NativeFabric)
    try:
        yield fabric, fabric.open_link(fabric.register(memory.ctypes.data, len(memory)))
    finally:
        fabric.close()


def test_each_event_goes_to_one_of_the_threads_that_ask() -> None:
    """What expects nothing arrives at once."""
    taken: list[FabricEvent] = []
    ended = threading.Event()
    with opened() as (fabric, link):

        def read() -> None:
            while not ended.is_set():
                taken.extend(fabric.events())

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for generation in range(NUM_ROUNDS):
            for slot in range(1, NUM_SLOTS + 1):
                fabric.expect(link, slot, generation, 0)
            for slot in range(1, NUM_SLOTS + 1):
                fabric.release(slot, generation)
        ended.set()
        for reader in readers:
            reader.join()
        taken += fabric.events()
    arrived = [(event.generation, event.slot) for event in taken if isinstance(event, Arrived)]
    assert sorted(arrived) == [
        (generation, slot) for generation in range(NUM_ROUNDS) for slot in range(1, NUM_SLOTS + 1)
    ]


def test_a_call_that_another_threads_close_overtakes_is_refused() -> None:
    """Between taking the handle and using it."""
    with opened() as (fabric, link):
        handle = fabric._open
        fabric.close()
        with pytest.raises(FabricError, match="the fabric is closed"):
            check(core().pdx_fabric_fence(handle, link))
        with pytest.raises(FabricError, match="the fabric is closed"):
            check(core().pdx_fabric_fd(handle))
