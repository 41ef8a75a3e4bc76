"""The node's fabrics, opened when first needed, with the KV memory registered in each.

Runs on the primary's event loop: fabric events wake it through a descriptor and are routed to the
link they concern.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pdx.errors import FabricError
from pdx.fabric import (
    Fabric,
    FabricEvent,
    FabricOptions,
    FabricStatistics,
    Fenced,
    MemoryPart,
    Provider,
    open_fabric,
)

__all__ = [
    "FabricHub",
    "FabricLink",
    "FabricOpener",
    "MappedMemory",
    "host_identity",
]

logger = logging.getLogger(__name__)


class FabricOpener(Protocol):
    """Where fabrics come from (:func:`open_fabric`, or a simulation)."""

    def __call__(
        self, *, provider: Provider, bind_host: Sequence[str], options: FabricOptions
    ) -> Fabric:
        """
        Raises:
            FabricError: the provider cannot be used here.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedMemory:
    """The ranks' memory as mapped into this process; whoever mapped it keeps it alive."""

    #: All ranks' KV, as NodeLayout has it: one part on the host; of each rank where it is a GPU's.
    kv_parts: tuple[MemoryPart, ...]
    #: The address of each rank's progress word.
    progress_addresses: tuple[int, ...]
    #: An eventfd of each rank, which the rank writes after each progress store.
    progress_eventfds: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricLink:
    """One link of one fabric."""

    fabric: Fabric
    link: int

    @property
    def provider(self) -> str:
        return self.fabric.provider


@dataclass(slots=True)
class _OpenFabric:
    fabric: Fabric
    region: int
    handlers: dict[int, Callable[[FabricEvent], None]] = field(default_factory=dict)


@functools.cache
def host_identity() -> str:
    """Equal for two processes exactly when libfabric's shm provider can work between them; it
    stays as long as the process.
    """
    folder = Path("/dev/shm")
    shared = folder.stat().st_dev if folder.is_dir() else f"none of {os.getpid()}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    pid_namespace = Path("/proc/self/ns/pid").readlink()
    return f"{boot}/{pid_namespace}/shm:{shared}"


class FabricHub:
    """Owns the fabrics; closed last of all that the messenger owns."""

    def __init__(
        self,
        memory: MappedMemory,
        options: FabricOptions,
        bind_hosts: Sequence[str] = (),
        opener: FabricOpener = open_fabric,
    ) -> None:
        """
        Args:
            bind_hosts: addresses to stripe over; without them a fabric takes the control
                connection's.
        """
        self.memory = memory
        on_gpus = any(part.device for part in memory.kv_parts)
        self._options = dataclasses.replace(options, device_memory=on_gpus)
        self._bind_hosts = tuple(bind_hosts)
        self._opener = opener
        #: Open fabrics by provider and, for network providers, the local addresses.
        self._fabrics: dict[tuple[str, tuple[str, ...]], _OpenFabric] = {}
        #: Providers of which it was said that they do not work here.
        self._unusable: set[Provider] = set()

    def open_link(
        self, provider: Provider, local_host: str, handler: Callable[[FabricEvent], None]
    ) -> FabricLink:
        """A new link whose events go to ``handler`` until its Fenced event has been delivered.

        Args:
            local_host: this side's address of the control connection: the peer can reach it.

        Raises:
            FabricError: the provider cannot be used here.
        """
        hosts = () if provider == Provider.SHM else self._bind_hosts or (local_host,)
        key = (provider, hosts)
        if key not in self._fabrics:
            self._fabrics[key] = self._open(provider, hosts)
        opened = self._fabrics[key]
        link = FabricLink(fabric=opened.fabric, link=opened.fabric.open_link(opened.region))
        opened.handlers[link.link] = handler
        return link

    def do_without(self, provider: Provider, error: FabricError) -> None:
        """A provider that may be chosen freely does not work here: say so once."""
        if provider not in self._unusable:
            self._unusable.add(provider)
            logger.warning("%s does not carry pages here, another way does: %s", provider, error)

    def discard(self, link: FabricLink) -> None:
        """Close a link that was never used; its remaining events go nowhere."""

        def drop(event: FabricEvent) -> None:
            if isinstance(event, Fenced):
                self.forget(link)

        self._opened(link).handlers[link.link] = drop
        link.fabric.fence(link.link)

    def forget(self, link: FabricLink) -> None:
        """The link was fenced; no more events come for it."""
        self._opened(link).handlers.pop(link.link, None)

    def statistics(self) -> list[FabricStatistics]:
        """Statistics of every open fabric."""
        return [opened.fabric.statistics() for opened in self._fabrics.values()]

    def close(self) -> None:
        """Close every fabric; nothing of ours is written or read through them afterwards."""
        loop = asyncio.get_running_loop()
        for opened in self._fabrics.values():
            loop.remove_reader(opened.fabric.fileno())
            opened.fabric.close()
        self._fabrics.clear()

    def _open(self, provider: Provider, hosts: Sequence[str]) -> _OpenFabric:
        fabric = self._opener(provider=provider, bind_host=hosts, options=self._options)
        try:
            region = fabric.register_parts(self.memory.kv_parts)
            for eventfd in self.memory.progress_eventfds:
                fabric.add_wakeup(eventfd)
        except FabricError:
            fabric.close()
            raise
        opened = _OpenFabric(fabric, region)
        asyncio.get_running_loop().add_reader(fabric.fileno(), self._on_readable, opened)
        return opened

    @staticmethod
    def _on_readable(opened: _OpenFabric) -> None:
        for event in opened.fabric.events():
            handler = opened.handlers.get(event.link)
            if handler is None:
                logger.warning("an event of an unknown link: %s", event)
            else:
                handler(event)

    def _opened(self, link: FabricLink) -> _OpenFabric:
        return next(o for o in self._fabrics.values() if o.fabric is link.fabric)
