"""A link's descriptor: the bytes that one side gives to the other, over a channel of the caller's.
Pure.

Little-endian: magic, version, provider, number of ends; the fixed fields; each end's fields, the
length of its address, the address; CRC-32 of all before. The checksum is against accidents; who may
connect is the channel's business.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import get_args

from pdx.errors import FabricError
from pdx.fabric.interface import MAX_DOMAINS, Provider

__all__ = ["MAX_NAME_BYTES", "MAX_WINDOW", "LinkAddress", "LinkEnd", "decode", "encode"]

_MAGIC = b"PDXL"
_VERSION = 2
_HEADER = struct.Struct("<4sHBB")
_FIXED = struct.Struct("<QQIIi")
_END = struct.Struct("<QQQQH")
_CRC = struct.Struct("<I")
_PROVIDERS: tuple[Provider, ...] = get_args(Provider)
MAX_NAME_BYTES = 511
MAX_WINDOW = 1 << 16
_MAX_TAG = (1 << 20) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnd:
    """A link in one domain of its fabric."""

    region_base: int
    region_key: int
    #: The link page, where beats go.
    page_base: int
    page_key: int
    #: The endpoint's address, in the provider's format.
    name: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAddress:
    """Everything that is needed to write into one link of a peer."""

    provider: Provider
    region_bytes: int
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
    body = _HEADER.pack(_MAGIC, _VERSION, provider, len(address.ends)) + _FIXED.pack(
        address.region_bytes,
        address.pid_namespace,
        address.window,
        address.probe_tag,
        address.pid,
    )
    for end in address.ends:
        numbers = (end.region_base, end.region_key, end.page_base, end.page_key, len(end.name))
        body += _END.pack(*numbers) + end.name
    return body + _CRC.pack(zlib.crc32(body))


def decode(descriptor: bytes) -> LinkAddress:
    """Read a peer's descriptor.

    Raises:
        FabricError: it is no descriptor of this version, or damaged.
    """
    if len(descriptor) < _HEADER.size or not descriptor.startswith(_MAGIC):
        raise FabricError("this is no fabric descriptor")
    _, version, provider, num_ends = _HEADER.unpack_from(descriptor)
    if version != _VERSION:
        raise FabricError(
            f"the peer's fabric descriptor has version {version}, ours is {_VERSION}",
            hint="run the same release on both sides",
        )
    body, crc = descriptor[: -_CRC.size], descriptor[-_CRC.size :]
    if len(body) < _HEADER.size + _FIXED.size or _CRC.unpack(crc)[0] != zlib.crc32(body):
        raise FabricError(f"a fabric descriptor of {len(descriptor)} bytes is damaged")
    num_bytes, namespace, window, tag, pid = _FIXED.unpack_from(body, _HEADER.size)
    ends = _decode_ends(body[_HEADER.size + _FIXED.size :])
    sound = (
        len(ends) == num_ends
        and 0 < num_ends <= MAX_DOMAINS
        and 0 < window <= MAX_WINDOW
        and tag <= _MAX_TAG
        and provider < len(_PROVIDERS)
    )
    if not sound:
        raise _senseless()
    return LinkAddress(
        provider=_PROVIDERS[provider],
        region_bytes=num_bytes,
        pid_namespace=namespace,
        window=window,
        probe_tag=tag,
        pid=pid,
        ends=ends,
    )


def _decode_ends(left: bytes) -> tuple[LinkEnd, ...]:
    ends: list[LinkEnd] = []
    while left:
        if len(left) < _END.size:
            raise _senseless()
        base, key, page_base, page_key, name_len = _END.unpack_from(left)
        name, left = left[_END.size : _END.size + name_len], left[_END.size + name_len :]
        if len(name) != name_len or not 0 < name_len <= MAX_NAME_BYTES:
            raise _senseless()
        ends.append(
            LinkEnd(
                region_base=base, region_key=key, page_base=page_base, page_key=page_key, name=name
            )
        )
    return tuple(ends)


def _senseless() -> FabricError:
    return FabricError("a fabric descriptor has fields that make no sense")
