"""A link's descriptor: the bytes that one side gives to the other, over a channel of the caller's.
Pure.

Little-endian: magic, version, provider, numbers of ends and of parts; the fixed fields; the parts'
lengths; each end's parts and fields, the length of its address, the address; CRC-32 of all before.
The checksum is against accidents; who may
connect is the channel's business.
"""

from __future__ import annotations

import socket
import struct
import sys
import zlib
from dataclasses import dataclass

from pdx.errors import FabricError
from pdx.fabric.interface import MAX_DOMAINS, MAX_PARTS, Provider

__all__ = [
    "MAX_NAME_BYTES",
    "MAX_WINDOW",
    "KeyedPart",
    "LinkAddress",
    "LinkEnd",
    "decode",
    "encode",
    "hosts",
]

_MAGIC = b"PDXL"
_VERSION = 3
_HEADER = struct.Struct("<4sHBBB")
_FIXED = struct.Struct("<QIIi")
_LENGTH = struct.Struct("<Q")
_PART = struct.Struct("<QQ")
_END = struct.Struct("<QQH")
_CRC = struct.Struct("<I")
_PROVIDERS = tuple(Provider)
MAX_NAME_BYTES = 511
MAX_WINDOW = 1 << 16
_MAX_TAG = (1 << 20) - 1


@dataclass(frozen=True, slots=True)
class KeyedPart:
    """What writes into one part of the region need."""

    base: int
    key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnd:
    """A link in one domain of its fabric."""

    #: One for each part of the region.
    parts: tuple[KeyedPart, ...]
    #: The link page, where beats go.
    page_base: int
    page_key: int
    #: The endpoint's address, in the provider's format.
    name: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAddress:
    """Everything that is needed to write into one link of a peer."""

    provider: Provider
    #: The size of each part of the region.
    part_bytes: tuple[int, ...]
    pid_namespace: int
    #: Immediates that may be on their way to each end.
    window: int
    #: What the probes' immediates must carry.
    probe_tag: int
    pid: int
    #: One in each domain of the peer's fabric.
    ends: tuple[LinkEnd, ...]


def encode(address: LinkAddress) -> bytes:
    """The descriptor's bytes."""
    provider = _PROVIDERS.index(address.provider)
    counts = (len(address.ends), len(address.part_bytes))
    body = _HEADER.pack(_MAGIC, _VERSION, provider, *counts) + _FIXED.pack(
        address.pid_namespace, address.window, address.probe_tag, address.pid
    )
    body += b"".join(map(_LENGTH.pack, address.part_bytes))
    for end in address.ends:
        body += b"".join(_PART.pack(part.base, part.key) for part in end.parts)
        body += _END.pack(end.page_base, end.page_key, len(end.name)) + end.name
    return body + _CRC.pack(zlib.crc32(body))


def decode(descriptor: bytes) -> LinkAddress:
    """Read a peer's descriptor.

    Raises:
        FabricError: it is no descriptor of this version, or damaged.
    """
    if len(descriptor) < _HEADER.size or not descriptor.startswith(_MAGIC):
        raise FabricError("this is no fabric descriptor")
    _, version, provider, num_ends, num_parts = _HEADER.unpack_from(descriptor)
    if version != _VERSION:
        raise FabricError(
            f"the peer's fabric descriptor has version {version}, ours is {_VERSION}",
            hint="run the same release on both sides",
        )
    body, crc = descriptor[: -_CRC.size], descriptor[-_CRC.size :]
    if len(body) < _HEADER.size + _FIXED.size or _CRC.unpack(crc)[0] != zlib.crc32(body):
        raise FabricError(f"a fabric descriptor of {len(descriptor)} bytes is damaged")
    namespace, window, tag, pid = _FIXED.unpack_from(body, _HEADER.size)
    left = body[_HEADER.size + _FIXED.size :]
    lengths, left = left[: num_parts * _LENGTH.size], left[num_parts * _LENGTH.size :]
    if len(lengths) != num_parts * _LENGTH.size:
        raise _senseless()
    part_bytes = tuple(length for (length,) in _LENGTH.iter_unpack(lengths))
    ends = _decode_ends(left, num_parts)
    sound = (
        len(ends) == num_ends
        and 0 < num_ends <= MAX_DOMAINS
        and 0 < num_parts <= MAX_PARTS
        and all(part_bytes)
        and sum(part_bytes) < 1 << 64
        and 0 < window <= MAX_WINDOW
        and tag <= _MAX_TAG
        and provider < len(_PROVIDERS)
    )
    if not sound:
        raise _senseless()
    return LinkAddress(
        provider=_PROVIDERS[provider],
        part_bytes=part_bytes,
        pid_namespace=namespace,
        window=window,
        probe_tag=tag,
        pid=pid,
        ends=ends,
    )


def hosts(descriptor: bytes) -> tuple[str, ...]:
    """The address of each end, for people; none for providers whose ends have no IP address.

    Raises:
        FabricError: it is no descriptor of this version, or damaged.
    """
    return tuple(host for end in decode(descriptor).ends if (host := _host(end.name)))


def _host(name: bytes) -> str:
    """The host in a sockaddr_in or sockaddr_in6, which begin with the family and the port."""
    family = int.from_bytes(name[:2], sys.byteorder)
    if family == socket.AF_INET and len(name) >= 8:
        return socket.inet_ntop(family, name[4:8])
    if family == socket.AF_INET6 and len(name) >= 24:
        return socket.inet_ntop(family, name[8:24])
    return ""


def _decode_ends(left: bytes, num_parts: int) -> tuple[LinkEnd, ...]:
    ends: list[LinkEnd] = []
    parts_bytes = num_parts * _PART.size
    while left:
        if len(left) < parts_bytes + _END.size:
            raise _senseless()
        parts = tuple(KeyedPart(*part) for part in _PART.iter_unpack(left[:parts_bytes]))
        page_base, page_key, name_len = _END.unpack_from(left, parts_bytes)
        left = left[parts_bytes + _END.size :]
        name, left = left[:name_len], left[name_len:]
        if len(name) != name_len or not 0 < name_len <= MAX_NAME_BYTES:
            raise _senseless()
        ends.append(LinkEnd(parts=parts, page_base=page_base, page_key=page_key, name=name))
    return tuple(ends)


def _senseless() -> FabricError:
    return FabricError("a fabric descriptor has fields that make no sense")
