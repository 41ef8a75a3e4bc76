"""What a fabric is: the Protocol, its frozen data, its events. Bytes, pages and immediates; no
language models.

A fabric writes pages of registered memory into a peer's registered memory, and counts what its
peers write here. One native worker thread owns the network; every method only validates and hands
over, so an event loop may call all of them. What happened comes back through :meth:`Fabric.events`.

Words: a *domain* is one address (one network card) that a fabric is bound to, with a queue of its
    own; a *region* is registered memory, of one part or several; a *link* joins one region of ours
    to one of a peer's and has an endpoint of its own in each domain; an *atom* is one page of one
    layer; a *transfer* is a set of atoms written over a link to one (slot, generation) of the peer,
    which counts atoms. An immediate is the 32-bit value that comes with a write: slot, generation,
    atoms - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdx.config.providers import Provider

__all__ = [
    "MAX_DOMAINS",
    "MAX_GENERATION",
    "MAX_PARTS",
    "MAX_SLOT",
    "Arrived",
    "DeviceMemory",
    "DomainStatistics",
    "Fabric",
    "FabricEvent",
    "FabricOptions",
    "FabricStatistics",
    "Fenced",
    "LinkDown",
    "LinkUp",
    "MemoryPart",
    "PageBatch",
    "Provider",
    "Surplus",
    "TransferDone",
]

#: Slots are 1 to this; slot 0 belongs to probes.
MAX_SLOT = 4095
MAX_GENERATION = 4095
#: Addresses that one fabric may be bound to.
MAX_DOMAINS = 8
#: The most parts that one region may have.
MAX_PARTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricOptions:
    """How the worker runs. Times end in their unit."""

    #: Core to pin the worker to; None leaves it to the kernel.
    cpu: int | None = None
    #: How long to poll without sleeping after the last activity, while something is expected;
    #: longer (2 ms at most) where the usual time between two is. Where other threads want the
    #: worker's core it is 5 at most.
    spin_us: int = 200
    beat_interval_s: float = 0.25
    #: A peer that is silent for this long is lost. Also half of how long libfabric may refuse to
    #: take any write.
    beat_timeout_s: float = 2.0
    #: From connect() until both probes have arrived.
    connect_timeout_s: float = 5.0
    #: Entries of each domain's completion queue. A link takes its window + 288 of them; beyond that
    #: open_link() is refused.
    queue_entries: int = 131072
    #: Whether regions may be a GPU's memory (verbs and efa).
    device_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Where a GPU's memory really is. Its address is the one that it is mapped at."""

    #: Stays open as long as the region is registered.
    dmabuf_fd: int
    dmabuf_offset: int = 0
    cuda_device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """Memory of one kind: the host's, or one GPU's."""

    address: int
    num_bytes: int
    device: DeviceMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBatch:
    """n pages x num_layers atoms of page_bytes, each from one place of our region to one place of
    the peer's.

    Atom (layer l, page i) is read at ``src_offset + l * src_layer_stride + src_pages[i] *
    src_page_stride`` from the start of our region, and written at the same expression with ``dst``
    from the start of the peer's. On each side all of a batch lies in one part of the region.
    """

    src_pages: NDArray[np.uint32]
    dst_pages: NDArray[np.uint32]
    page_bytes: int
    num_layers: int
    src_offset: int = 0
    dst_offset: int = 0
    src_layer_stride: int
    dst_layer_stride: int
    #: None: pages lie side by side (page_bytes).
    src_page_stride: int | None = None
    dst_page_stride: int | None = None

    @property
    def num_atoms(self) -> int:
        """What the receiver counts for this batch."""
        return len(self.src_pages) * self.num_layers

    @property
    def page_strides(self) -> tuple[int, int]:
        """From one page to the next, in our region and in the peer's, bytes."""
        src, dst = self.src_page_stride, self.dst_page_stride
        return self.page_bytes if src is None else src, self.page_bytes if dst is None else dst


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUp:
    """Both probes arrived: writes go both ways."""

    link: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDown:
    """The link is lost, once: a failed operation, or no beat, or no connection in time. Nothing
    more is posted on it.

    What the peer has begun to write may still land: fence the link before its memory is used again.
    """

    link: int
    #: libfabric's (positive) error number.
    code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """Nothing of this link touches our memory any more, once for each fence().

    No byte of the peer lands, and no byte of ours is read. (A stopped shm peer pulls when it wakes
    up. So over shm, with writes of ours in flight, this comes only when the peer's endpoint or its
    process is gone.)
    """

    link: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferDone:
    """The end of a transfer on the writing side, once. It says nothing about what has arrived.

    The source pages are free for other use, unless ``code`` is set: then only after Fenced.
    """

    transfer: int
    link: int
    slot: int
    generation: int
    #: Atoms handed to libfabric.
    posted_atoms: int
    #: How many of these failed, or were in flight at the fence. They may have arrived all
    #: the same.
    failed_atoms: int
    cancelled: bool
    #: 0, or libfabric's (positive) error number of what ended the transfer (ECANCELED: a fence).
    code: int
    #: CLOCK_MONOTONIC, when the first write was given to libfabric.
    first_post_ns: int | None
    #: CLOCK_MONOTONIC, when the worker saw the last layer of the last armed batch become due.
    last_progress_ns: int | None

    @property
    def failed(self) -> bool:
        """Whether something else than a cancel ended it early."""
        return self.code != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """The count is what was expected. The slot stays armed (for a surplus) until release()."""

    link: int
    slot: int
    generation: int
    atoms: int
    #: CLOCK_MONOTONIC, ascending; at most 256 entries, so for large transfers they are thinned.
    arrival_ns: NDArray[np.int64]
    #: The count at each of these times.
    arrival_atoms: NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surplus:
    """The count is above what was expected, once: the peer and we disagree, and the link should be
    fenced.
    """

    link: int
    slot: int
    generation: int
    count: int


FabricEvent = LinkUp | LinkDown | Fenced | TransferDone | Arrived | Surplus


@dataclass(frozen=True, slots=True)
class FabricStatistics:
    """Counters since the fabric was opened; they only rise."""

    writes_posted: int
    bytes_posted: int
    atoms_posted: int
    writes_completed: int
    writes_failed: int
    #: Completions of operations whose link was fenced before.
    late_completions: int
    #: Posts that libfabric refused for the moment.
    eagain: int
    imms_reaped: int
    atoms_reaped: int
    #: Immediates whose (slot, generation) was not armed: dropped.
    stale_imms: int
    surplus_slots: int
    #: Immediates that belong to no open link: their credit goes back with their sender's next beat.
    unowned_imms: int
    beats_sent: int
    links_up: int
    links_down: int
    links_fenced: int
    #: Errors on the completion queue that belong to no operation of ours.
    queue_errors: int
    sleeps: int


@dataclass(frozen=True, slots=True)
class DomainStatistics:
    """Counters of one domain, as FabricStatistics' of all."""

    writes_posted: int
    bytes_posted: int
    imms_reaped: int


class Fabric(Protocol):
    """One provider on one address of this host or several. Methods may be called from any thread.

    With several, a link's writes are striped over them, whole atoms at a time. The peer may have
    another number of addresses: with n here and m there, max(n, m) pairs of them carry the link,
    and it is lost when one of these is.

    Every method raises FabricError when it is refused, and when the fabric is closed.
    """

    @property
    def provider(self) -> Provider:
        """How the bytes travel."""

    def fileno(self) -> int:
        """A descriptor that is readable while events() has something."""

    def register(self, address: int, num_bytes: int) -> int:
        """Name memory of the host that links may use: register_parts() of the one part."""

    def register_parts(self, parts: Sequence[MemoryPart]) -> int:
        """Name memory of the caller's that links may use. It must outlive the region or the fabric.

        Each part is registered by itself, with keys of its own. Offsets count from the start of the
        first part through all of them, wherever they are mapped.

        Raises:
            FabricError: also for a GPU's memory where the fabric was not opened for it, or
                libfabric is older than 1.20.
        """

    def unregister(self, region: int) -> None:
        """Forget a region. Refused while one of its links is not Fenced."""

    def open_link(self, region: int, *, window: int = 256) -> int:
        """An endpoint in each domain, and registrations of the region with keys of their own.

        Args:
            window: immediates to each domain that the peer may have sent and we have not counted.

        Raises:
            FabricError: also when the completion queue or the process's descriptors are full.
        """

    def descriptor(self, link: int) -> bytes:
        """What the peer's connect() needs."""

    def connect(self, link: int, peer_descriptor: bytes) -> None:
        """Start to connect: LinkUp follows when the probes went both ways, else LinkDown.

        Raises:
            FabricError: the descriptor is damaged, of another version, or of another provider.
        """

    def fence(self, link: int) -> None:
        """Close the link's endpoints; its slots stop counting at once. Fenced follows, after
        TransferDone of its transfers.

        A second fence does nothing.
        """

    def open_transfer(self, link: int, slot: int, generation: int) -> int:
        """Begin a transfer on a connected link. What is written before LinkUp waits for it."""

    def write(self, transfer: int, batch: PageBatch) -> None:
        """Post all layers of the batch now.

        Raises:
            FabricError: the batch leaves a region, or one part of it, or the transfer is sealed,
                cancelled or done.
        """

    def arm(self, transfer: int, batch: PageBatch, *, word_address: int, first_value: int) -> None:
        """Post layer l of the batch as soon as the uint64 at ``word_address`` is at least
        ``first_value + l``.

        The word is read with acquire order until the transfer is done. Raises as write() does.
        """

    def seal(self, transfer: int) -> None:
        """No more batches come: TransferDone once everything is posted and complete."""

    def cancel(self, transfer: int) -> None:
        """Drop what is not posted; TransferDone once what is posted is complete. After the end it
        does nothing.
        """

    def expect(self, link: int, slot: int, generation: int, atoms: int) -> None:
        """Start to count: from its return on, atoms with this slot and generation are counted.

        One number for whatever part of the region they go to: one worker reaps them all, each is
        posted once and arrives once at most, so that a sum is short by exactly what is missing.

        Raises:
            FabricError: also when the slot is armed already.
        """

    def retarget(self, slot: int, generation: int, atoms: int) -> None:
        """Wait for another count: what a drained peer says it posted. Arrived follows when equal,
        also at once.
        """

    def count(self, slot: int, generation: int) -> int:
        """How many atoms of an armed pair have come so far.

        Raises:
            FabricError: the pair is not armed.
        """

    def release(self, slot: int, generation: int) -> int:
        """Stop counting; later atoms are stale. Returns the count so far."""

    def add_wakeup(self, fd: int) -> None:
        """An eventfd that someone writes after storing a progress word, so that an armed worker may
        sleep on it.

        Once one is added, all progress words' writers must have one: the worker stops polling words
        in short naps. It is never drained, so several fabrics may share it; the caller may close
        its own descriptor.
        """

    def remove_wakeup(self, fd: int) -> None:
        """Forget what add_wakeup() was given."""

    def events(self) -> list[FabricEvent]:
        """All that happened since the last call, in order. Each event goes to one caller."""

    def statistics(self) -> FabricStatistics:
        """The counters now."""

    def domain_statistics(self) -> tuple[DomainStatistics, ...]:
        """The statistics of each domain, in the order of the addresses."""

    def close(self) -> None:
        """Join the worker, close everything, remove what lies in /dev/shm. A second close does
        nothing. Calls of other threads end first; what they call later is refused.
        """
