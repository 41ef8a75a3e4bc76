"""SimulatedFabric: the face of a fabric on a simulated network. It validates as the native one
does, and hands over to its worker; no thread, no clock and no randomness of its own.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

from pdx.errors import FabricError
from pdx.fabric import descriptor as descriptors
from pdx.fabric.checks import check_batch, check_unsigned, check_word_address
from pdx.fabric.descriptor import KeyedPart, LinkAddress, LinkEnd
from pdx.fabric.interface import (
    MAX_DOMAINS,
    MAX_PARTS,
    DomainStatistics,
    FabricEvent,
    FabricOptions,
    FabricStatistics,
    MemoryPart,
    PageBatch,
    Provider,
    TransferDone,
)
from pdx.lab.simulated_fabric.link import Link, OwnEnd
from pdx.lab.simulated_fabric.network import SimulatedNetwork
from pdx.lab.simulated_fabric.nodes import Endpoint
from pdx.lab.simulated_fabric.region import Region, check_place
from pdx.lab.simulated_fabric.transfer import Batch, Transfer
from pdx.lab.simulated_fabric.worker import Worker

__all__ = ["SimulatedFabric"]

_STATISTICS = tuple(each.name for each in fields(FabricStatistics))
#: Completion queue entries of a link beside its window.
_ENTRIES_PER_LINK = 288


@dataclass(slots=True)
class _OpenLink:
    link: Link
    endpoints: list[Endpoint]
    parts: tuple[KeyedPart, ...]
    peer: LinkAddress | None = None


@dataclass(slots=True)
class _OpenTransfer:
    link: int
    closed: bool = False


class SimulatedFabric:
    """:class:`Fabric` in a simulated room.

    Addresses are those of ``network.memory``; progress words are stored with its store_word().

    Args:
        network: the room.
        node: the process it belongs to; a kill hits all fabrics of the node.
        provider: whose behaviour is simulated.
        num_domains: addresses that it has (tcp).
    """

    def __init__(
        self,
        network: SimulatedNetwork,
        node: str,
        *,
        provider: Provider = Provider.TCP,
        num_domains: int = 1,
        options: FabricOptions | None = None,
    ) -> None:
        assert 1 <= num_domains <= (MAX_DOMAINS if provider == Provider.TCP else 1)
        options = options or FabricOptions()
        self._network = network
        self._provider = provider
        self._num_domains = num_domains
        self._node = network.node(node)
        self._entries_left = self._queue_entries = options.queue_entries
        self._worker = Worker(network, self._node, provider, num_domains, options, self._tell)
        self._node.workers.append(self._worker)
        self._regions: dict[int, Region] = {}
        self._links: dict[int, _OpenLink] = {}
        self._transfers: dict[int, _OpenTransfer] = {}
        self._wakeups: set[int] = set()
        self._events: list[FabricEvent] = []
        self._listener: Callable[[], None] | None = None
        self._fd: int | None = None
        self._closed = False
        #: Identifiers are this fabric's own, as the native one's are.
        self._next_id = 1
        self._last_link = 0

    @property
    def provider(self) -> Provider:
        """The provider whose behaviour is simulated."""
        return self._provider

    def on_events(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` some virtual time after events() got something: what a loop's reader on
        fileno() is to the native fabric.
        """
        self._listener = listener

    def fileno(self) -> int:
        """A descriptor that is readable while events() has something; made when first asked for."""
        self._check_open()
        if self._fd is None:
            self._fd = os.eventfd(int(bool(self._events)), os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._fd

    def register(self, address: int, num_bytes: int) -> int:
        """See :meth:`Fabric.register`."""
        return self.register_parts([MemoryPart(address=address, num_bytes=num_bytes)])

    def register_parts(self, parts: Sequence[MemoryPart]) -> int:
        """See :meth:`Fabric.register_parts`. There is no device memory here."""
        self._check_open()
        if not 0 < len(parts) <= MAX_PARTS:
            raise FabricError(
                f"a region of {len(parts)} parts: it may have 1 to {MAX_PARTS}", code=errno.EINVAL
            )
        for part in parts:
            self._check_part(part)
        region = Region(self._take_id(), tuple(parts))
        self._regions[region.id] = region
        return region.id

    def unregister(self, region: int) -> None:
        """See :meth:`Fabric.unregister`."""
        num_links = self._region(region).num_links
        if num_links:
            raise FabricError(
                f"region {region} is still used by {num_links} links that are not fenced",
                code=errno.EBUSY,
            )
        del self._regions[region]

    def open_link(self, region: int, *, window: int = 256) -> int:
        """See :meth:`Fabric.open_link`."""
        of_region = self._region(region)
        if not 0 < window <= descriptors.MAX_WINDOW:
            raise FabricError(f"a window of {window} is not between 1 and {descriptors.MAX_WINDOW}")
        if window + _ENTRIES_PER_LINK > self._entries_left:
            raise FabricError(
                f"the completion queue of {self._queue_entries} entries is promised to the links "
                "that are open",
                code=errno.ENOSPC,
            )
        self._entries_left -= window + _ENTRIES_PER_LINK
        of_region.num_links += 1
        tag = self._network.take_key() & 0xFFFFF
        own = [OwnEnd() for _ in range(self._num_domains)]
        link = Link(self._take_id(), of_region, window, tag, own)
        endpoints = [
            self._network.add_endpoint(self._node, self._provider, self._worker, link, domain)
            for domain in range(self._num_domains)
        ]
        parts = tuple(KeyedPart(p.address, self._network.take_key()) for p in of_region.parts)
        self._links[link.id] = _OpenLink(link, endpoints, parts)
        self._last_link = link.id
        self._worker.submit(partial(self._worker.add_link, link, endpoints))
        return link.id

    def descriptor(self, link: int) -> bytes:
        """See :meth:`Fabric.descriptor`."""
        opened = self._link(link)
        ends = (
            LinkEnd(
                parts=opened.parts,
                page_base=0,
                page_key=0,
                name=endpoint.name,
            )
            for endpoint in opened.endpoints
        )
        return descriptors.encode(
            LinkAddress(
                provider=self._provider,
                part_bytes=opened.link.region.part_bytes,
                pid_namespace=0,
                window=opened.link.window,
                probe_tag=opened.link.probe_tag,
                pid=self._node.pid,
                ends=tuple(ends),
            )
        )

    def connect(self, link: int, peer_descriptor: bytes) -> None:
        """See :meth:`Fabric.connect`."""
        peer = descriptors.decode(peer_descriptor)
        if peer.provider != self._provider:
            raise FabricError(f"the peer's link is {peer.provider}, ours is {self._provider}")
        opened = self._link(link)
        if opened.peer is not None:
            raise FabricError(f"link {link} is connected already", code=errno.EISCONN)
        if self._provider == Provider.SHM:
            if peer.pid == self._node.pid:
                raise FabricError("shm joins two processes, and this peer is in our own")
            if self._network.owner(peer.ends[0].name) is None:
                raise FabricError("the peer's process is gone", code=errno.ESRCH)
        opened.peer = peer
        self._worker.submit(partial(self._worker.liveness.connect, link, peer))

    def fence(self, link: int) -> None:
        """See :meth:`Fabric.fence`."""
        self._check_open()
        opened = self._links.pop(link, None)
        if opened is None:
            if not 0 < link <= self._last_link:
                raise FabricError(f"link {link} was never opened", code=errno.ENOENT)
            return
        self._worker.slots.disarm_link(link)
        self._worker.submit(partial(self._close_link, opened))

    def open_transfer(self, link: int, slot: int, generation: int) -> int:
        """See :meth:`Fabric.open_transfer`."""
        self._worker.slots.check(slot, generation)
        if self._link(link).peer is None:
            raise FabricError(f"link {link} is not connected", code=errno.ENOTCONN)
        transfer = Transfer(self._take_id(), link, slot, generation)
        self._transfers[transfer.id] = _OpenTransfer(link)
        self._worker.submit(partial(self._worker.open_transfer, transfer))
        return transfer.id

    def write(self, transfer: int, batch: PageBatch) -> None:
        """See :meth:`Fabric.write`."""
        self._add(transfer, batch, None, 0)

    def arm(self, transfer: int, batch: PageBatch, *, word_address: int, first_value: int) -> None:
        """See :meth:`Fabric.arm`."""
        check_word_address(word_address)
        check_unsigned("first_value", first_value)
        self._network.memory.load_word(word_address)
        self._add(transfer, batch, word_address, first_value)

    def seal(self, transfer: int) -> None:
        """See :meth:`Fabric.seal`."""
        self._end(transfer, self._worker.seal)

    def cancel(self, transfer: int) -> None:
        """See :meth:`Fabric.cancel`."""
        self._end(transfer, self._worker.cancel)

    def expect(self, link: int, slot: int, generation: int, atoms: int) -> None:
        """See :meth:`Fabric.expect`."""
        self._worker.slots.check(slot, generation)
        check_unsigned("atoms", atoms)
        self._link(link)
        self._worker.slots.expect(link, slot, generation, atoms)

    def retarget(self, slot: int, generation: int, atoms: int) -> None:
        """See :meth:`Fabric.retarget`."""
        self._check_pair(slot, generation)
        check_unsigned("atoms", atoms)
        self._worker.slots.retarget(slot, generation, atoms)

    def count(self, slot: int, generation: int) -> int:
        """See :meth:`Fabric.count`."""
        self._check_pair(slot, generation)
        return self._worker.slots.count(slot, generation)

    def release(self, slot: int, generation: int) -> int:
        """See :meth:`Fabric.release`."""
        self._check_pair(slot, generation)
        return self._worker.slots.release(slot, generation)

    def add_wakeup(self, fd: int) -> None:
        """See :meth:`Fabric.add_wakeup`. Words are watched here, so it changes nothing."""
        self._check_open()
        self._wakeups.add(fd)

    def remove_wakeup(self, fd: int) -> None:
        """See :meth:`Fabric.remove_wakeup`."""
        self._check_open()
        if fd not in self._wakeups:
            raise FabricError(f"descriptor {fd} was not added")
        self._wakeups.remove(fd)

    def events(self) -> list[FabricEvent]:
        """See :meth:`Fabric.events`."""
        self._check_open()
        taken, self._events = self._events, []
        if taken and self._fd is not None:
            os.eventfd_read(self._fd)
        for event in taken:
            if isinstance(event, TransferDone):
                del self._transfers[event.transfer]
        return taken

    def statistics(self) -> FabricStatistics:
        """See :meth:`Fabric.statistics`. What only threads and real queues have stays 0."""
        self._check_open()
        counters = self._worker.counters
        return FabricStatistics(**{name: counters.get(name, 0) for name in _STATISTICS})

    def domain_statistics(self) -> tuple[DomainStatistics, ...]:
        """See :meth:`Fabric.domain_statistics`."""
        self._check_open()
        names = [field.name for field in fields(DomainStatistics)]
        return tuple(
            DomainStatistics(**{name: counters.get(name, 0) for name in names})
            for counters in self._worker.domain_counters
        )

    def close(self) -> None:
        """See :meth:`Fabric.close`."""
        if self._closed:
            return
        self._closed = True
        self._worker.stop()
        self._node.workers.remove(self._worker)
        if self._fd is not None:
            os.close(self._fd)

    # ---- private --------------------------------------------------------------------------------

    def _add(self, transfer: int, batch: PageBatch, word: int | None, first_value: int) -> None:
        self._check_open()
        check_batch(batch)
        opened = self._transfers.get(transfer)
        if opened is None or opened.closed:
            raise FabricError(f"transfer {transfer} takes no more batches", code=errno.ENOENT)
        link = self._links.get(opened.link)
        if link is None:
            return  # fenced: the transfer's end is on its way
        assert link.peer is not None
        if batch.num_atoms:
            check_place(batch, link.link.region.part_bytes, link.peer.part_bytes)
        added = Batch(batch, word=word, first_value=first_value)
        self._worker.submit(partial(self._worker.add_batch, transfer, added))

    def _end(self, transfer: int, how: Callable[[int], None]) -> None:
        self._check_open()
        opened = self._transfers.get(transfer)
        if opened is not None:
            opened.closed = True
            self._worker.submit(partial(how, transfer))

    def _close_link(self, opened: _OpenLink) -> None:
        self._entries_left += opened.link.window + _ENTRIES_PER_LINK
        self._worker.fence(opened.link.id)

    def _tell(self, event: FabricEvent) -> None:
        self._events.append(event)
        if len(self._events) > 1:
            return
        if self._fd is not None:
            os.eventfd_write(self._fd, 1)
        if self._listener is not None:
            delay_ns = self._network.draw_worker_ns()
            self._network.defer(self._node, delay_ns, self._notify)

    def _notify(self) -> None:
        if self._events and self._listener is not None and not self._closed:
            self._listener()

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _region(self, region: int) -> Region:
        self._check_open()
        if region not in self._regions:
            raise FabricError(f"region {region} is not registered", code=errno.ENOENT)
        return self._regions[region]

    def _link(self, link: int) -> _OpenLink:
        self._check_open()
        if link not in self._links:
            raise FabricError(f"link {link} is not open", code=errno.ENOENT)
        return self._links[link]

    def _check_part(self, part: MemoryPart) -> None:
        if part.device is not None:
            raise FabricError("a simulated fabric has host memory only", code=errno.EOPNOTSUPP)
        check_unsigned("address", part.address)
        check_unsigned("num_bytes", part.num_bytes)
        if not part.address or not part.num_bytes:
            raise FabricError("a region needs an address and at least one byte", code=errno.EINVAL)
        self._network.memory.view(part.address, part.num_bytes)

    def _check_pair(self, slot: int, generation: int) -> None:
        self._check_open()
        self._worker.slots.check(slot, generation)

    def _check_open(self) -> None:
        if self._closed:
            raise FabricError("the fabric is closed")
