"""A fabric that commits the faults of ``PDX_FAULT`` at its face; all below is the real one.

Runs on the primary's event loop, for whose tests it is. See pdx.config.faults for what each does.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import os
import select
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from pdx.config.faults import Faults
from pdx.fabric.interface import (
    Arrived,
    Fabric,
    FabricEvent,
    FabricOptions,
    Fenced,
    PageBatch,
    Provider,
    TransferDone,
)

__all__ = ["faulty_opener"]

_NEVER_S = 1e6
_LOOK_S = 0.0005


def faulty_opener(faults: Faults, open_fabric: Callable[..., Fabric]) -> Callable[..., Fabric]:
    """An opener of fabrics that commit these faults."""

    def open_faulty(
        *, provider: Provider, bind_host: Sequence[str], options: FabricOptions
    ) -> Fabric:
        if faults.get("no-heartbeat") is not None:
            options = dataclasses.replace(options, beat_interval_s=_NEVER_S)
        fabric = open_fabric(provider=provider, bind_host=bind_host, options=options)
        return cast("Fabric", _FaultyFabric(fabric, faults))

    return open_faulty


class _FaultyFabric:
    """What is not here is the real fabric's."""

    def __init__(self, fabric: Fabric, faults: Faults) -> None:
        self._fabric = fabric
        self._faults = faults
        #: Calls that wait for SIGUSR2, by transfer.
        self._stalled: dict[int, list[Callable[[], None]]] = {}
        self._num_pages: Counter[int] = Counter()
        self._num_arrived = 0
        #: Ends of transfers that are told later, and those that are due.
        self._late: list[TransferDone] = []
        self._due: list[FabricEvent] = []
        self._due_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._either = select.epoll()
        self._either.register(self._due_fd, select.EPOLLIN)
        self._either.register(fabric.fileno(), select.EPOLLIN)
        if faults.get("stall-write") is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._release)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fabric, name)

    def fileno(self) -> int:
        return self._either.fileno()

    def close(self) -> None:
        self._fabric.close()
        self._either.close()
        os.close(self._due_fd)

    # ---- writing --------------------------------------------------------------------------

    def arm(self, transfer: int, batch: PageBatch, *, word_address: int, first_value: int) -> None:
        if (last_layer := self._faults.get("kill-after-layer")) is not None:
            self._kill_at(word_address, first_value + last_layer)
        if (page := self._faults.get("fail-post")) is not None:
            self._arm_some(transfer, batch, word_address, first_value, page)
            return
        if (layer := self._faults.get("stall-write")) is None:
            self._arm(transfer, batch, word_address, first_value)
            return
        before, after = _split(batch, min(layer, batch.num_layers))
        if before is not None:
            self._arm(transfer, before, word_address, first_value)
        if after is not None:
            later = first_value + batch.num_layers - after.num_layers
            calls = self._stalled.setdefault(transfer, [])
            calls.append(lambda: self._arm(transfer, after, word_address, later))

    def seal(self, transfer: int) -> None:
        if transfer in self._stalled:
            self._stalled[transfer].append(lambda: self._fabric.seal(transfer))
        else:
            self._fabric.seal(transfer)

    def cancel(self, transfer: int) -> None:
        self._stalled.pop(transfer, None)
        self._fabric.cancel(transfer)

    def _arm(self, transfer: int, batch: PageBatch, word_address: int, first_value: int) -> None:
        self._fabric.arm(transfer, batch, word_address=word_address, first_value=first_value)

    def _arm_some(
        self, transfer: int, batch: PageBatch, word_address: int, first_value: int, page: int
    ) -> None:
        left = page - self._num_pages[transfer]
        self._num_pages[transfer] += len(batch.src_pages)
        if left > 0:
            some = dataclasses.replace(
                batch, src_pages=batch.src_pages[:left], dst_pages=batch.dst_pages[:left]
            )
            self._arm(transfer, some, word_address, first_value)
        if left < len(batch.src_pages):
            self._fabric.cancel(transfer)

    def _release(self) -> None:
        stalled, self._stalled = self._stalled, {}
        for calls in stalled.values():
            for call in calls:
                call()

    @staticmethod
    def _kill_at(word_address: int, value: int) -> None:
        word = ctypes.c_uint64.from_address(word_address)
        loop = asyncio.get_running_loop()

        def look() -> None:
            if word.value >= value:
                os.kill(os.getpid(), signal.SIGKILL)
            loop.call_later(_LOOK_S, look)

        look()

    # ---- events ---------------------------------------------------------------------------

    def events(self) -> list[FabricEvent]:
        found: list[FabricEvent] = []
        if self._due:
            os.eventfd_read(self._due_fd)
            found, self._due = self._due, []
        for event in self._fabric.events():
            match event:
                case TransferDone() if self._faults.get("delay-ack") is not None:
                    self._tell_later(event)
                case Fenced(link=link):
                    found += [late for late in self._late if late.link == link]
                    self._late = [late for late in self._late if late.link != link]
                    found.append(event)
                case Arrived():
                    found += self._noticed(event)
                case _:
                    found.append(event)
        return found

    def _noticed(self, event: Arrived) -> list[FabricEvent]:
        self._num_arrived += 1
        if self._num_arrived == self._faults.get("drop-completion"):
            return []
        return [event, event] if self._faults.get("dup-completion") is not None else [event]

    def _tell_later(self, event: TransferDone) -> None:
        def tell() -> None:
            if event in self._late:
                self._late.remove(event)
                self._due.append(event)
                os.eventfd_write(self._due_fd, 1)

        self._late.append(event)
        delay_ms = self._faults.get("delay-ack")
        assert delay_ms is not None
        asyncio.get_running_loop().call_later(delay_ms / 1000, tell)


def _split(batch: PageBatch, layer: int) -> tuple[PageBatch | None, PageBatch | None]:
    """The batch's layers before this one, and from it on."""
    before = dataclasses.replace(batch, num_layers=layer) if layer else None
    if layer == batch.num_layers:
        return before, None
    after = dataclasses.replace(
        batch,
        num_layers=batch.num_layers - layer,
        src_offset=batch.src_offset + layer * batch.src_layer_stride,
        dst_offset=batch.dst_offset + layer * batch.dst_layer_stride,
        src_pages=np.array(batch.src_pages),
        dst_pages=np.array(batch.dst_pages),
    )
    return before, after
