"""One side of the measured pair: a fabric, a pool, one link. Owned by its process's main thread."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from typing import TypeVar

from pdx.errors import FabricError
from pdx.fabric.interface import (
    Arrived,
    FabricEvent,
    FabricOptions,
    LinkDown,
    LinkUp,
    Provider,
    TransferDone,
)
from pdx.fabric.native_fabric import open_fabric
from pdx.lab.transfers.pattern import map_pool, new_file

__all__ = ["Endpoint"]

_EVENT_S = 30.0
#: The receiver counts each write's immediate; more than the default lets small pages run ahead.
_WINDOW = 4096
_E = TypeVar("_E", Arrived, LinkUp, TransferDone)


class Endpoint:
    """What both sides have. close() it, or the fabric's thread goes on.

    Args:
        file: the pool's, which the caller keeps; None: one of its own.
    """

    def __init__(
        self,
        provider: Provider,
        bind_hosts: Sequence[str],
        pool_bytes: int,
        options: FabricOptions | None = None,
        file: int | None = None,
    ) -> None:
        fd = new_file(pool_bytes) if file is None else os.dup(file)
        try:
            self._memory, self.pool = map_pool(fd, pool_bytes)
        finally:
            os.close(fd)
        self.fabric = open_fabric(provider=provider, bind_host=bind_hosts or None, options=options)
        self._early: list[FabricEvent] = []
        region = self.fabric.register(self.pool.ctypes.data, pool_bytes)
        self.link = self.fabric.open_link(region, window=_WINDOW)
        self.descriptor = self.fabric.descriptor(self.link)

    def connect(self, peer_descriptor: bytes) -> None:
        """Return when writes go both ways."""
        self.fabric.connect(self.link, peer_descriptor)
        self.wait(LinkUp)

    def wait(self, kind: type[_E]) -> _E:
        """The next event of this kind; others are kept.

        Raises:
            FabricError: the link went down, or nothing came in time.
        """
        until = time.monotonic() + _EVENT_S
        while True:
            for i, event in enumerate(self._early):
                if isinstance(event, LinkDown):
                    raise FabricError(f"the link is down: {event.reason}", code=event.code)
                if isinstance(event, kind):
                    del self._early[i]
                    return event
            left = until - time.monotonic()
            if left <= 0:
                raise FabricError(f"no {kind.__name__} in {_EVENT_S:g} s")
            select.select([self.fabric], [], [], left)
            self._early += self.fabric.events()

    def close(self) -> None:
        """End the fabric; the pool goes with the last reference to it."""
        self.fabric.close()
