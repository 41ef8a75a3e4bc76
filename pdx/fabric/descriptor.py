"""A link's descriptor: the bytes that one side gives to the other, over a channel of the caller's.
Pure.

Little-endian: magic, version, provider, length of the endpoint's address, the fixed fields, the
address, CRC-32 of all before. The checksum is against accidents; who may connect is the channel's
business.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from pdx.errors import FabricError
from pdx.fabric.interface import Provider

__all__ = ["MAX_NAME_BYTES", "MAX_WINDOW", "LinkAddress", "decode", "encode"]

_MAGIC = b"PDXL"
_VERSION = 1
_HEADER = struct.Struct("<4sHBB")
_FIXED = struct.Struct("<QQQQQQIIiH")
_CRC = struct.Struct("<I")
_PROVIDERS: tuple[Provider, ...] = ("tcp", "shm")
MAX_NAME_BYTES = 511
MAX_WINDOW = 1 << 16
_MAX_TAG = (1 << 20) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAddress:
    """Everything that is needed to write into one link of a peer."""

    provider: Provider
    region_base: int
    region_bytes: int
    region_key: int
    #: The link page, where beats go.
    page_base: int
    page_key: int
    pid_namespace: int
    #: Immediates that may be on their way to it.
    window: int
    #: What the probe's immediate must carry.
    probe_tag: int
    pid: int
    #: The endpoint's address, in the provider's format.
    name: bytes


def encode(address: LinkAddress) -> bytes:
    """The descriptor's bytes."""
    fixed = _FIXED.pack(
        address.region_base,
        address.region_bytes,
        address.region_key,
        address.page_base,
        address.page_key,
        address.pid_namespace,
        address.window,
        address.probe_tag,
        address.pid,
        len(address.name),
    )
    header = _HEADER.pack(_MAGIC, _VERSION, _PROVIDERS.index(address.provider), 0)
    body = header + fixed + address.name
    return body + _CRC.pack(zlib.crc32(body))


def decode(descriptor: bytes) -> LinkAddress:
    """Read a peer's descriptor.

    Raises:
        FabricError: it is no descriptor of this version, or damaged.
    """
    if len(descriptor) < _HEADER.size or not descriptor.startswith(_MAGIC):
        raise FabricError("this is no fabric descriptor")
    _, version, provider, _ = _HEADER.unpack_from(descriptor)
    if version != _VERSION:
        raise FabricError(
            f"the peer's fabric descriptor has version {version}, ours is {_VERSION}",
            hint="run the same release on both sides",
        )
    body, crc = descriptor[: -_CRC.size], descriptor[-_CRC.size :]
    if len(body) < _HEADER.size + _FIXED.size or _CRC.unpack(crc)[0] != zlib.crc32(body):
        raise FabricError(f"a fabric descriptor of {len(descriptor)} bytes is damaged")
    *numbers, name_len = _FIXED.unpack_from(body, _HEADER.size)
    name = body[_HEADER.size + _FIXED.size :]
    base, num_bytes, key, page_base, page_key, namespace, window, tag, pid = numbers
    sound = (
        len(name) == name_len
        and 0 < name_len <= MAX_NAME_BYTES
        and 0 < window <= MAX_WINDOW
        and tag <= _MAX_TAG
        and provider < len(_PROVIDERS)
    )
    if not sound:
        raise FabricError("a fabric descriptor has fields that make no sense")
    return LinkAddress(
        provider=_PROVIDERS[provider],
        region_base=base,
        region_bytes=num_bytes,
        region_key=key,
        page_base=page_base,
        page_key=page_key,
        pid_namespace=namespace,
        window=window,
        probe_tag=tag,
        pid=pid,
        name=name,
    )
