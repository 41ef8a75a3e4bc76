"""Links' addresses and regions' parts between Python's words and the core's. Pure."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from pdx.fabric.checks import check_unsigned
from pdx.fabric.descriptor import KeyedPart, LinkAddress, LinkEnd
from pdx.fabric.interface import MemoryPart, Provider
from pdx.fabric.native_library import AddressStruct, PartStruct

__all__ = ["address_of", "native_address", "native_parts"]


def native_parts(parts: Sequence[MemoryPart]) -> ctypes.Array[PartStruct]:
    """A region's parts for the core.

    Raises:
        FabricError: a number is too large for it.
    """
    return (PartStruct * len(parts))(*map(_native_part, parts))


def address_of(own: AddressStruct, provider: Provider) -> LinkAddress:
    """What the core says of a link."""
    num_parts = own.num_parts
    return LinkAddress(
        provider=provider,
        part_bytes=tuple(own.part_bytes[:num_parts]),
        pid_namespace=own.pid_namespace,
        window=own.window,
        probe_tag=own.probe_tag,
        pid=own.pid,
        ends=tuple(
            LinkEnd(
                parts=tuple(map(KeyedPart, end.part_bases[:num_parts], end.part_keys[:num_parts])),
                page_base=end.page_base,
                page_key=end.page_key,
                name=bytes(end.name[: end.name_len]),
            )
            for end in own.ends[: own.num_ends]
        ),
    )


def native_address(peer: LinkAddress) -> AddressStruct:
    """A peer's link for the core."""
    native = AddressStruct(
        pid_namespace=peer.pid_namespace,
        window=peer.window,
        probe_tag=peer.probe_tag,
        pid=peer.pid,
        num_parts=len(peer.part_bytes),
        num_ends=len(peer.ends),
    )
    native.part_bytes[: len(peer.part_bytes)] = peer.part_bytes
    for to, end in zip(native.ends, peer.ends, strict=False):
        to.part_bases[: len(end.parts)] = [part.base for part in end.parts]
        to.part_keys[: len(end.parts)] = [part.key for part in end.parts]
        to.page_base, to.page_key = end.page_base, end.page_key
        to.name_len = len(end.name)
        to.name[: len(end.name)] = end.name
    return native


def _native_part(part: MemoryPart) -> PartStruct:
    native = PartStruct(
        address=check_unsigned("address", part.address),
        num_bytes=check_unsigned("num_bytes", part.num_bytes),
        dmabuf_fd=-1,
    )
    if part.device is not None:
        native.dmabuf_fd = part.device.dmabuf_fd
        native.dmabuf_offset = check_unsigned("dmabuf_offset", part.device.dmabuf_offset)
        native.cuda_device = part.device.cuda_device
    return native
