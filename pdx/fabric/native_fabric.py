"""The fabric on libfabric: Python's face of the native core, and the functions that open it.

Nothing here runs per page or per layer. The core's worker thread is its own; these methods run on
the caller's.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_uint64, c_void_p
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, assert_never

from pdx.errors import FabricError
from pdx.fabric import descriptor as descriptors
from pdx.fabric.bind_addresses import bindable_address, bindable_addresses, check_number
from pdx.fabric.checks import check_batch, check_unsigned, check_word_address
from pdx.fabric.interface import (
    MAX_GENERATION,
    MAX_SLOT,
    DomainStatistics,
    Fabric,
    FabricEvent,
    FabricOptions,
    FabricStatistics,
    MemoryPart,
    PageBatch,
    Provider,
)
from pdx.fabric.native_address import address_of, native_address, native_parts
from pdx.fabric.native_events import event_of
from pdx.fabric.native_library import (
    BATCH_STRUCT,
    AddressStruct,
    EventStruct,
    OptionsStruct,
    check,
    core,
    load_libfabric,
)
from pdx.host.roce import roce_address
from pdx.host.shared_memory import SHM_HINT, shm_lack

__all__ = ["LibraryInfo", "NativeFabric", "available_providers", "library_info", "open_fabric"]

_PROVIDERS: Final = tuple(Provider)
_EVENTS_PER_CALL = 64


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
    *,
    provider: Provider,
    bind_host: str | Sequence[str] | None = None,
    options: FabricOptions | None = None,
) -> Fabric:
    """Start a worker on one provider.

    Args:
        provider: "tcp", "shm" for peers on the same host, or a network card's "verbs" or "efa".
        bind_host: the address that peers reach (tcp, verbs), the device's name (verbs on RoCE) or
            the domain's (efa), or several, to stripe over all of them; None is 127.0.0.1 (tcp), or
            what libfabric offers first.
        options: how the worker runs; None takes the defaults.

    Raises:
        FabricError: libfabric cannot be loaded, or refuses the provider or an address.
    """
    load_libfabric()
    named = [bind_host] if isinstance(bind_host, str) else list(bind_host or ())
    hosts: tuple[str, ...] = ()
    match provider:
        case Provider.TCP:
            hosts = bindable_addresses(named or ["127.0.0.1"])
        case Provider.VERBS:
            hosts = tuple(_verbs_host(name) for name in named)
        case Provider.EFA:
            hosts = tuple(named)
        case Provider.SHM:
            if (lack := shm_lack(available_providers())) is not None:
                raise FabricError(lack, hint=SHM_HINT)
        case _:
            assert_never(provider)
    check_number(hosts)
    return NativeFabric(provider, hosts, options or FabricOptions())


def _verbs_host(name: str) -> str:
    is_device = Path("/sys/class/infiniband", name).exists()
    return bindable_address(roce_address(name) if is_device else name)


class NativeFabric:
    """:class:`Fabric` on libfabric. Made by :func:`open_fabric`."""

    def __init__(self, provider: Provider, hosts: tuple[str, ...], options: FabricOptions) -> None:
        self._core = core()
        self._provider = provider
        self._num_domains = len(hosts) or 1
        handle = c_void_p()
        native = OptionsStruct(
            provider=_PROVIDERS.index(provider),
            hosts="\n".join(hosts).encode(),
            cpu=-1 if options.cpu is None else options.cpu,
            device_memory=int(options.device_memory),
            cq_entries=options.queue_entries,
            spin_ns=options.spin_us * 1000,
            beat_interval_ns=round(options.beat_interval_s * 1e9),
            beat_timeout_ns=round(options.beat_timeout_s * 1e9),
            connect_timeout_ns=round(options.connect_timeout_s * 1e9),
        )
        check(self._core.pdx_fabric_open(ctypes.byref(native), ctypes.byref(handle)))
        self._handle: c_void_p | None = handle
        # Also at interpreter exit: a worker must not outlive the memory that Python unmaps.
        weakref.finalize(self, self._core.pdx_fabric_delete, handle)

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
        return self.register_parts([MemoryPart(address=address, num_bytes=num_bytes)])

    def register_parts(self, parts: Sequence[MemoryPart]) -> int:
        """See :meth:`Fabric.register_parts`."""
        native = native_parts(parts)
        return check(self._core.pdx_fabric_register(self._open, native, len(native)))

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
        return descriptors.encode(address_of(own, self._provider))

    def connect(self, link: int, peer_descriptor: bytes) -> None:
        """See :meth:`Fabric.connect`."""
        peer = descriptors.decode(peer_descriptor)
        if peer.provider != self._provider:
            raise FabricError(f"the peer's link is {peer.provider}, ours is {self._provider}")
        native = native_address(peer)
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
        check_word_address(word_address)
        self._add(transfer, batch, word_address, check_unsigned("first_value", first_value))

    def _add(self, transfer: int, batch: PageBatch, word_address: int, first_value: int) -> None:
        check_batch(batch)
        page_bytes = batch.page_bytes
        packed = BATCH_STRUCT.pack(
            len(batch.src_pages),
            page_bytes,
            batch.src_offset,
            batch.dst_offset,
            batch.src_layer_stride,
            batch.dst_layer_stride,
            *batch.page_strides,
            batch.num_layers,
            word_address,
            first_value,
        )
        # Copies of the pages: their addresses would cost more than they do.
        src, dst = batch.src_pages.tobytes(), batch.dst_pages.tobytes()
        check(self._core.pdx_fabric_add_batch(self._open, transfer, packed, src, dst))

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
                self._open, link, slot, generation, check_unsigned("atoms", atoms)
            )
        )

    def retarget(self, slot: int, generation: int, atoms: int) -> None:
        """See :meth:`Fabric.retarget`."""
        _check_slot(slot, generation)
        check(
            self._core.pdx_fabric_retarget(
                self._open, slot, generation, check_unsigned("atoms", atoms)
            )
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
        # This call's own: others may run, in other threads or in a signal's handler.
        room = (EventStruct * _EVENTS_PER_CALL)()
        while True:
            count = check(self._core.pdx_fabric_events(self._open, room, _EVENTS_PER_CALL))
            taken += [event_of(room[i]) for i in range(count)]
            if count < _EVENTS_PER_CALL:
                return taken

    def statistics(self) -> FabricStatistics:
        """See :meth:`Fabric.statistics`."""
        count = len(fields(FabricStatistics))
        values = (c_uint64 * count)()
        taken = check(self._core.pdx_fabric_statistics(self._open, values, count))
        assert taken == count
        return FabricStatistics(*values)

    def domain_statistics(self) -> tuple[DomainStatistics, ...]:
        """See :meth:`Fabric.domain_statistics`."""
        count = len(fields(DomainStatistics))
        values = (c_uint64 * count)()
        found = []
        for i in range(self._num_domains):
            taken = check(self._core.pdx_fabric_domain_statistics(self._open, i, values, count))
            assert taken == count
            found.append(DomainStatistics(*values))
        return tuple(found)

    def close(self) -> None:
        """See :meth:`Fabric.close`."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._core.pdx_fabric_close(handle)


def _check_slot(slot: int, generation: int) -> None:
    # ctypes would cut larger numbers to 32 bits.
    if not 1 <= slot <= MAX_SLOT or not 0 <= generation <= MAX_GENERATION:
        raise FabricError(
            f"slot {slot} generation {generation} is out of range: slots are 1 to {MAX_SLOT}, "
            f"generations 0 to {MAX_GENERATION}"
        )
