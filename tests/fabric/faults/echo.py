"""A peer that answers: each page that arrives comes back to the same slot and generation."""

from __future__ import annotations

import select
import threading
from typing import Any

import numpy as np

from pdx.fabric import Arrived, PageBatch
from pdx.fabric.interface import MAX_GENERATION

__all__ = ["begin_request", "request_pages", "start_echo"]


def request_pages(num_pages: int, page_bytes: int) -> PageBatch:
    """Every second page, so that each is one of its own."""
    pages = np.arange(0, 2 * num_pages, 2, dtype=np.uint32)
    return PageBatch(
        src_pages=pages,
        dst_pages=pages,
        page_bytes=page_bytes,
        num_layers=1,
        src_layer_stride=0,
        dst_layer_stride=0,
    )


def begin_request(fabric: Any, link: int, slot: int, generation: int, batch: PageBatch) -> None:
    """One paged write to a slot of the peer, and nothing to wait for."""
    transfer = fabric.open_transfer(link, slot, generation)
    fabric.write(transfer, batch)
    fabric.seal(transfer)


def start_echo(side: Any, link: int, num_slots: int, requests: int, batch: PageBatch) -> None:
    """Answer so many requests on a thread of the side's process. For ``Side.run()``."""
    for slot in range(1, num_slots + 1):
        side.fabric.expect(link, slot, 0, batch.num_atoms)
    arguments = (side.fabric, link, requests, batch)
    threading.Thread(target=_echo, args=arguments, daemon=True).start()


def _echo(fabric: Any, link: int, requests: int, batch: PageBatch) -> None:
    while requests:
        select.select([fabric], [], [])
        for event in fabric.events():
            if isinstance(event, Arrived):
                fabric.release(event.slot, event.generation)
                following = (event.generation + 1) & MAX_GENERATION
                fabric.expect(link, event.slot, following, batch.num_atoms)
                begin_request(fabric, link, event.slot, event.generation, batch)
                requests -= 1
