"""The node's fabrics, one per provider, opened when first needed, with the KV memory registered in each.

Runs on the primary's event loop: fabric events wake it through a descriptor and are routed to the link they concern.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pdx.errors import FabricError
from pdx.fabric import Fabric, Fenced, FabricEvent, FabricOptions, open_fabric

__all__ = ["FabricHub", "FabricLink", "MappedMemory", "host_identity"]

logger = logging.getLogger(__name__)
Provider = Literal["tcp", "shm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedMemory:
    """A rank's KV memory and progress word as mapped into this process; the mapper keeps them alive."""

    kv_address: int
    kv_bytes: int
    progress_address: int
    #: Written by the rank after each progress store.
    progress_eventfd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricLink:
    """One link of one fabric."""

    fabric: Fabric
    link: int

    @property
    def provider(self) -> str:
        return self.fabric.provider


def host_identity() -> str:
    """Equal for two processes exactly when libfabric's shm provider can work between them."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    pid_namespace = os.readlink("/proc/self/ns/pid")
    return f"{boot}/{pid_namespace}/shm:{os.stat('/dev/shm').st_dev}"


class FabricHub:
    """Owns the fabrics; closed last of all that the messenger owns."""

    def __init__(self, memory: MappedMemory, *, bind_host: str, options: FabricOptions) -> None:
        self.memory = memory
        self._bind_host = bind_host
        self._options = options
        self._fabrics: dict[str, tuple[Fabric, int]] = {}
        self._handlers: dict[tuple[str, int], Callable[[FabricEvent], None]] = {}

    def open_link(self, provider: Provider, handler: Callable[[FabricEvent], None]) -> FabricLink:
        """A new link whose events go to ``handler`` until its Fenced event has been delivered.

        Raises:
            FabricError: the provider cannot be used here.
        """
        fabric, region = self._fabric(provider)
        link = FabricLink(fabric=fabric, link=fabric.open_link(region))
        self._handlers[provider, link.link] = handler
        return link

    def close(self) -> None:
        """Close every fabric; nothing of ours is written or read through them afterwards."""
        loop = asyncio.get_running_loop()
        for fabric, _ in self._fabrics.values():
            loop.remove_reader(fabric.fileno())
            fabric.close()
        self._fabrics.clear()

    def _fabric(self, provider: Provider) -> tuple[Fabric, int]:
        if provider not in self._fabrics:
            fabric = open_fabric(
                provider=provider, bind_host=self._bind_host, options=self._options
            )
            try:
                region = fabric.register(self.memory.kv_address, self.memory.kv_bytes)
                fabric.add_wakeup(self.memory.progress_eventfd)
            except FabricError:
                fabric.close()
                raise
            self._fabrics[provider] = fabric, region
            asyncio.get_running_loop().add_reader(fabric.fileno(), self._on_readable, fabric)
        return self._fabrics[provider]

    def _on_readable(self, fabric: Fabric) -> None:
        for event in fabric.events():
            handler = self._handlers.get((fabric.provider, event.link))
            if handler is None:
                logger.warning("an event of an unknown link: %s", event)
            else:
                handler(event)

    def discard(self, link: FabricLink) -> None:
        """Close a link that was never used; its remaining events go nowhere."""

        def drop(event: FabricEvent) -> None:
            if isinstance(event, Fenced):
                self.forget(link)

        self._handlers[link.provider, link.link] = drop
        link.fabric.fence(link.link)

    def forget(self, link: FabricLink) -> None:
        """The link was fenced; no more events come for it."""
        self._handlers.pop((link.provider, link.link), None)
