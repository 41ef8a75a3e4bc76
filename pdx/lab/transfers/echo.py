"""Latency: one page there, one page back, each side told by its own fabric's count."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from pdx.fabric.interface import MAX_GENERATION, Arrived, PageBatch, TransferDone
from pdx.lab.transfers.endpoint import Endpoint

__all__ = ["answer_pages", "time_round_trips"]

_SLOT = 2


def answer_pages(
    endpoint: Endpoint, page_bytes: int, count: int, on_armed: Callable[[], None]
) -> None:
    """Write one page back for each that arrives. ``on_armed``: the first may come."""
    _expect(endpoint, 0)
    on_armed()
    for i in range(count):
        endpoint.wait(Arrived)
        endpoint.fabric.release(_SLOT, _generation(i))
        if i + 1 < count:
            _expect(endpoint, i + 1)  # before the answer, or the next page could be too early
        _write(endpoint, page_bytes, i)
        endpoint.wait(TransferDone)


def time_round_trips(endpoint: Endpoint, page_bytes: int, count: int) -> list[int]:
    """Nanoseconds from a page's submission until this process has seen the answer."""
    round_trips: list[int] = []
    for i in range(count):
        _expect(endpoint, i)
        begun = time.monotonic_ns()
        _write(endpoint, page_bytes, i)
        endpoint.wait(Arrived)
        round_trips.append(time.monotonic_ns() - begun)
        endpoint.fabric.release(_SLOT, _generation(i))
        endpoint.wait(TransferDone)
    return round_trips


def _generation(i: int) -> int:
    return i % (MAX_GENERATION + 1)


def _expect(endpoint: Endpoint, i: int) -> None:
    endpoint.fabric.expect(endpoint.link, _SLOT, _generation(i), 1)


def _write(endpoint: Endpoint, page_bytes: int, i: int) -> None:
    page = np.zeros(1, np.uint32)
    batch = PageBatch(
        src_pages=page,
        dst_pages=page,
        page_bytes=page_bytes,
        num_layers=1,
        src_layer_stride=0,
        dst_layer_stride=0,
    )
    transfer = endpoint.fabric.open_transfer(endpoint.link, _SLOT, _generation(i))
    endpoint.fabric.write(transfer, batch)
    endpoint.fabric.seal(transfer)
