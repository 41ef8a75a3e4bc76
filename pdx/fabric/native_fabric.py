"""The fabric on libfabric: Python's face of the native core, and the functions that open it.

Nothing here runs per page or per layer. The core's worker thread is its own; these methods run on
the caller's.
"""

from __future__ import annotations

import ctypes
import enum
import ipaddress
import socket
import weakref
from ctypes import c_uint64, c_void_p
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar, assert_never

import numpy as np
from numpy.typing import NDArray

from pdx.errors import FabricError
from pdx.fabric import descriptor as descriptors
from pdx.fabric.descriptor import LinkAddress
from pdx.fabric.interface import (
    MAX_GENERATION,
    MAX_SLOT,
    Arrived,
    Fabric,
    FabricEvent,
    FabricOptions,
    FabricStatistics,
    Fenced,
    LinkDown,
    LinkUp,
    PageBatch,
    Provider,
    Surplus,
    TransferDone,
)
from pdx.fabric.native_library import (
    AddressStruct,
    BatchStruct,
    EventStruct,
    OptionsStruct,
    check,
    core,
    load_libfabric,
)

__all__ = ["LibraryInfo", "NativeFabric", "available_providers", "library_info", "open_fabric"]

_PROVIDERS: Final[tuple[Provider, ...]] = ("tcp", "shm")
_EVENTS_PER_CALL = 64
_UINT64 = (1 << 64) - 1
_Number = TypeVar("_Number", np.int64, np.uint32)
_NAME_OFFSET = AddressStruct.name.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryInfo:
    """The libfabric in use and what it offers here."""

    path: str
    version: str
    #: Ours to libfabric's name: ``{"tcp": "net"}`` with libfabric 1.17.
    providers: dict[Provider, str]


def library_info() -> LibraryInfo:
    """Load libfabric and ask it for providers.

    Raises:
        FabricError: no libfabric can be loaded.
    """
    loaded = load_libfabric()
    found: dict[Provider, str] = {}
    for index, provider in enumerate(_PROVIDERS):
        name = ctypes.create_string_buffer(64)
        check(core().pdx_fabric_provider(index, name, len(name)))
        if name.value:
            found[provider] = name.value.decode()
    return LibraryInfo(
        path=loaded.path, version=".".join(map(str, loaded.version)), providers=found
    )


def available_providers() -> tuple[Provider, ...]:
    """The providers that this host's libfabric offers; none where it cannot be loaded."""
    try:
        return tuple(library_info().providers)
    except FabricError:
        return ()


def open_fabric(
    *, provider: Provider, bind_host: str | None = None, options: FabricOptions | None = None
) -> Fabric:
    """Start a worker on one provider.

    Args:
        provider: "tcp", or "shm" for peers on the same host.
        bind_host: the address that peers reach (tcp); None is 127.0.0.1.
        options: how the worker runs; None takes the defaults.

    Raises:
        FabricError: libfabric cannot be loaded, or refuses the provider or the address.
    """
    load_libfabric()
    host, ipv6 = _numeric_host(bind_host or "127.0.0.1") if provider == "tcp" else ("", False)
    return NativeFabric(provider, host, ipv6, options or FabricOptions())


def _numeric_host(host: str) -> tuple[str, bool]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise FabricError(f"the fabric's address {host!r} cannot be resolved: {error}") from error
    numeric = str(found[0][4][0])
    address = ipaddress.ip_address(numeric.partition("%")[0])
    if address.is_unspecified:
        raise FabricError(
            f"the fabric cannot be bound to {host!r}: peers need one address that they can reach",
            hint="name an address of one network interface",
        )
    # libfabric would say so only when the first link is opened.
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((numeric, 0))
        except OSError as error:
            raise FabricError(
                f"the fabric cannot be bound to {host!r}, which is no address of this host: {error}"
            ) from error
    return numeric, address.version == 6


class NativeFabric:
    """:class:`Fabric` on libfabric. Made by :func:`open_fabric`."""

    def __init__(self, provider: Provider, host: str, ipv6: bool, options: FabricOptions) -> None:
        self._core = core()
        self._provider = provider
        handle = c_void_p()
        native = OptionsStruct(
            provider=_PROVIDERS.index(provider),
            ipv6=int(ipv6),
            host=host.encode(),
            cpu=-1 if options.cpu is None else options.cpu,
            cq_entries=options.queue_entries,
            spin_ns=options.spin_us * 1000,
            beat_interval_ns=round(options.beat_interval_s * 1e9),
            beat_timeout_ns=round(options.beat_timeout_s * 1e9),
            connect_timeout_ns=round(options.connect_timeout_s * 1e9),
        )
        check(self._core.pdx_fabric_open(ctypes.byref(native), ctypes.byref(handle)))
        self._handle: c_void_p | None = handle
        # Also at interpreter exit: a worker must not outlive the memory that Python unmaps.
        self._close = weakref.finalize(self, self._core.pdx_fabric_close, handle)
        self._events = (EventStruct * _EVENTS_PER_CALL)()

    @property
    def provider(self) -> Provider:
        """How the bytes travel."""
        return self._provider

    @property
    def _open(self) -> c_void_p:
        if self._handle is None:
            raise FabricError("the fabric is closed")
        return self._handle

    def fileno(self) -> int:
        """A descriptor that is readable while events() has something."""
        return check(self._core.pdx_fabric_fd(self._open))

    def register(self, address: int, num_bytes: int) -> int:
        """See :meth:`Fabric.register`."""
        return check(
            self._core.pdx_fabric_register(
                self._open, _unsigned("address", address), _unsigned("num_bytes", num_bytes)
            )
        )

    def unregister(self, region: int) -> None:
        """See :meth:`Fabric.unregister`."""
        check(self._core.pdx_fabric_unregister(self._open, region))

    def open_link(self, region: int, *, window: int = 256) -> int:
        """See :meth:`Fabric.open_link`."""
        if not 0 < window <= descriptors.MAX_WINDOW:
            raise FabricError(f"a window of {window} is not between 1 and {descriptors.MAX_WINDOW}")
        return check(self._core.pdx_fabric_open_link(self._open, region, window))

    def descriptor(self, link: int) -> bytes:
        """See :meth:`Fabric.descriptor`."""
        own = AddressStruct()
        check(self._core.pdx_fabric_own_address(self._open, link, ctypes.byref(own)))
        return descriptors.encode(
            LinkAddress(
                provider=self._provider,
                region_base=own.region_base,
                region_bytes=own.region_bytes,
                region_key=own.region_key,
                page_base=own.page_base,
                page_key=own.page_key,
                pid_namespace=own.pid_namespace,
                window=own.window,
                probe_tag=own.probe_tag,
                pid=own.pid,
                name=bytes(own)[_NAME_OFFSET:][: own.name_len],
            )
        )

    def connect(self, link: int, peer_descriptor: bytes) -> None:
        """See :meth:`Fabric.connect`."""
        peer = descriptors.decode(peer_descriptor)
        if peer.provider != self._provider:
            raise FabricError(f"the peer's link is {peer.provider}, ours is {self._provider}")
        native = AddressStruct(
            region_base=peer.region_base,
            region_bytes=peer.region_bytes,
            region_key=peer.region_key,
            page_base=peer.page_base,
            page_key=peer.page_key,
            pid_namespace=peer.pid_namespace,
            window=peer.window,
            probe_tag=peer.probe_tag,
            pid=peer.pid,
            name_len=len(peer.name),
        )
        # The field would end at a zero byte, which socket addresses contain.
        ctypes.memmove(ctypes.addressof(native) + _NAME_OFFSET, peer.name, len(peer.name))
        check(self._core.pdx_fabric_connect(self._open, link, ctypes.byref(native)))

    def fence(self, link: int) -> None:
        """See :meth:`Fabric.fence`."""
        check(self._core.pdx_fabric_fence(self._open, link))

    def open_transfer(self, link: int, slot: int, generation: int) -> int:
        """See :meth:`Fabric.open_transfer`."""
        _check_slot(slot, generation)
        return check(self._core.pdx_fabric_open_transfer(self._open, link, slot, generation))

    def write(self, transfer: int, batch: PageBatch) -> None:
        """See :meth:`Fabric.write`."""
        self._add(transfer, batch, 0, 0)

    def arm(self, transfer: int, batch: PageBatch, *, word_address: int, first_value: int) -> None:
        """See :meth:`Fabric.arm`."""
        if word_address <= 0 or word_address % 8:
            raise FabricError(f"a progress word at {word_address:#x} is not 8-byte aligned memory")
        self._add(transfer, batch, word_address, _unsigned("first_value", first_value))

    def _add(self, transfer: int, batch: PageBatch, word_address: int, first_value: int) -> None:
        src, dst = _page_array(batch.src_pages), _page_array(batch.dst_pages)
        if len(src) != len(dst):
            raise FabricError(f"{len(src)} source pages do not match {len(dst)} target pages")
        if batch.page_bytes <= 0 or batch.num_layers < 0:
            raise FabricError("a batch needs page_bytes above 0 and no negative number of layers")
        stride = batch.page_bytes
        native = BatchStruct(
            src_pages=src.ctypes.data,
            dst_pages=dst.ctypes.data,
            num_pages=len(src),
            page_bytes=batch.page_bytes,
            src_offset=_unsigned("src_offset", batch.src_offset),
            dst_offset=_unsigned("dst_offset", batch.dst_offset),
            src_layer_stride=_unsigned("src_layer_stride", batch.src_layer_stride),
            dst_layer_stride=_unsigned("dst_layer_stride", batch.dst_layer_stride),
            src_page_stride=_unsigned("src_page_stride", batch.src_page_stride, stride),
            dst_page_stride=_unsigned("dst_page_stride", batch.dst_page_stride, stride),
            num_layers=batch.num_layers,
            word=word_address,
            first_value=first_value,
        )
        check(self._core.pdx_fabric_add_batch(self._open, transfer, ctypes.byref(native)))

    def seal(self, transfer: int) -> None:
        """See :meth:`Fabric.seal`."""
        check(self._core.pdx_fabric_seal(self._open, transfer))

    def cancel(self, transfer: int) -> None:
        """See :meth:`Fabric.cancel`."""
        check(self._core.pdx_fabric_cancel(self._open, transfer))

    def expect(self, link: int, slot: int, generation: int, atoms: int) -> None:
        """See :meth:`Fabric.expect`."""
        _check_slot(slot, generation)
        check(
            self._core.pdx_fabric_expect(
                self._open, link, slot, generation, _unsigned("atoms", atoms)
            )
        )

    def retarget(self, slot: int, generation: int, atoms: int) -> None:
        """See :meth:`Fabric.retarget`."""
        _check_slot(slot, generation)
        check(
            self._core.pdx_fabric_retarget(self._open, slot, generation, _unsigned("atoms", atoms))
        )

    def count(self, slot: int, generation: int) -> int:
        """See :meth:`Fabric.count`."""
        _check_slot(slot, generation)
        return check(self._core.pdx_fabric_count(self._open, slot, generation))

    def release(self, slot: int, generation: int) -> int:
        """See :meth:`Fabric.release`."""
        _check_slot(slot, generation)
        return check(self._core.pdx_fabric_release(self._open, slot, generation))

    def add_wakeup(self, fd: int) -> None:
        """See :meth:`Fabric.add_wakeup`."""
        check(self._core.pdx_fabric_add_wakeup(self._open, fd))

    def remove_wakeup(self, fd: int) -> None:
        """See :meth:`Fabric.remove_wakeup`."""
        check(self._core.pdx_fabric_remove_wakeup(self._open, fd))

    def events(self) -> list[FabricEvent]:
        """See :meth:`Fabric.events`."""
        taken: list[FabricEvent] = []
        while True:
            count = check(self._core.pdx_fabric_events(self._open, self._events, _EVENTS_PER_CALL))
            taken += [_event(self._events[i]) for i in range(count)]
            if count < _EVENTS_PER_CALL:
                return taken

    def statistics(self) -> FabricStatistics:
        """See :meth:`Fabric.statistics`."""
        count = len(fields(FabricStatistics))
        values = (c_uint64 * count)()
        assert self._core.pdx_fabric_statistics(self._open, values, count) == count
        return FabricStatistics(*values)

    def close(self) -> None:
        """See :meth:`Fabric.close`."""
        self._handle = None
        self._close()


class _Kind(enum.IntEnum):
    """EventKind of native/events.hpp."""

    LINK_UP = 1
    LINK_DOWN = 2
    FENCED = 3
    TRANSFER_DONE = 4
    ARRIVED = 5
    SURPLUS = 6


def _event(event: EventStruct) -> FabricEvent:
    link, slot, generation = event.link, event.slot, event.generation
    kind = _Kind(event.kind)
    match kind:
        case _Kind.LINK_UP:
            return LinkUp(link=link)
        case _Kind.LINK_DOWN:
            reason = event.reason.decode(errors="replace")
            return LinkDown(link=link, code=event.code, reason=reason)
        case _Kind.FENCED:
            return Fenced(link=link)
        case _Kind.TRANSFER_DONE:
            return TransferDone(
                transfer=event.transfer,
                link=link,
                slot=slot,
                generation=generation,
                posted_atoms=event.atoms,
                failed_atoms=event.failed_atoms,
                cancelled=bool(event.cancelled),
                code=event.code,
                first_post_ns=event.first_post_ns or None,
                last_progress_ns=event.last_progress_ns or None,
            )
        case _Kind.ARRIVED:
            return Arrived(
                link=link,
                slot=slot,
                generation=generation,
                atoms=event.atoms,
                arrival_ns=_taken(event.arrival_ns, event.num_arrivals, np.int64),
                arrival_atoms=_taken(event.arrival_atoms, event.num_arrivals, np.uint32),
            )
        case _Kind.SURPLUS:
            return Surplus(link=link, slot=slot, generation=generation, count=event.atoms)
    assert_never(kind)


def _taken(pointer: Any, count: int, dtype: type[_Number]) -> NDArray[_Number]:
    """An array of the core's, copied and given back."""
    if not count:
        return np.empty(0, dtype)
    copy = np.ctypeslib.as_array(pointer, (count,)).astype(dtype)
    core().pdx_fabric_free(ctypes.cast(pointer, c_void_p))
    return copy


def _page_array(pages: NDArray[np.uint32]) -> NDArray[np.uint32]:
    if pages.ndim != 1 or pages.dtype != np.uint32:
        raise FabricError(f"page indices are a {pages.ndim}-d array of {pages.dtype}, not uint32")
    return np.ascontiguousarray(pages)


def _unsigned(name: str, value: int | None, default: int = 0) -> int:
    number = default if value is None else value
    if not 0 <= number <= _UINT64:
        raise FabricError(f"{name} is {number}, which is not an unsigned 64-bit number")
    return number


def _check_slot(slot: int, generation: int) -> None:
    # ctypes would cut larger numbers to 32 bits.
    if not 1 <= slot <= MAX_SLOT or not 0 <= generation <= MAX_GENERATION:
        raise FabricError(
            f"slot {slot} generation {generation} is out of range: slots are 1 to {MAX_SLOT}, "
            f"generations 0 to {MAX_GENERATION}"
        )
