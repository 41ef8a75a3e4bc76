"""Links are opened while the worker reads the queue."""

from __future__ import annotations

import select

import numpy as np

from pdx.fabric import Fenced, Provider, open_fabric

NUM_LINKS = 200


def test_links_open_while_the_queue_is_read(provider: Provider) -> None:
    """An armed slot keeps the worker reading. Meeting one half made would crash it."""
    memory = np.zeros(4096, np.uint8)
    fabric = open_fabric(provider=provider)
    try:
        region = fabric.register(memory.ctypes.data, len(memory))
        fabric.expect(fabric.open_link(region), 1, 0, 1)
        for _ in range(NUM_LINKS):
            fabric.fence(fabric.open_link(region))
        num_fenced = 0
        while num_fenced < NUM_LINKS:
            assert select.select([fabric.fileno()], [], [], 10)[0]
            num_fenced += sum(isinstance(event, Fenced) for event in fabric.events())
    finally:
        fabric.close()
