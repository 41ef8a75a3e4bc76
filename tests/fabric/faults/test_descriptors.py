"""Descriptors that are damaged, stale, or that lie about what they lead to."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from pdx.errors import FabricError
from pdx.fabric import Provider
from pdx.fabric.descriptor import KeyedPart, decode, encode
from tests.fabric.batches import dense
from tests.fabric.pairs import Pair
from tests.fabric.sides import Side, assert_serves

PAGE_BYTES = 4096


def _forged(descriptor: bytes, **changes: Any) -> bytes:
    """With other fields, of the one end or of the whole."""
    address = decode(descriptor)
    (end,) = address.ends
    of_end = {name: changes.pop(name) for name in list(changes) if hasattr(end, name)}
    ends = (dataclasses.replace(end, **of_end),)
    return encode(dataclasses.replace(address, ends=ends, **changes))


@pytest.fixture(params=[1, 3])
def descriptor(provider: Provider, request: pytest.FixtureRequest) -> Any:
    num_parts = request.param
    side = Side(provider, num_parts * PAGE_BYTES)
    side.register_spans([(i * PAGE_BYTES, PAGE_BYTES) for i in range(num_parts)])
    yield side.open_link()[1]
    side.close()


def test_a_change_of_any_byte_and_a_cut_at_any_length_are_refused(descriptor: bytes) -> None:
    for index in range(len(descriptor)):
        with pytest.raises(FabricError):
            decode(descriptor[:index])
        for mask in (0x01, 0x80, 0xFF):
            altered = bytearray(descriptor)
            altered[index] ^= mask
            with pytest.raises(FabricError):
                decode(bytes(altered))
    assert encode(decode(descriptor)) == descriptor


def test_what_a_descriptor_says_is_read_back_or_refused_whatever_it_is(descriptor: bytes) -> None:
    """The checksum is against accidents: whoever alters a byte can sum it up again."""
    for index in range(len(descriptor) - 4):
        for mask in (0x01, 0x04, 0x80, 0xFF):
            body = bytearray(descriptor[:-4])
            body[index] ^= mask
            altered = bytes(body) + struct.pack("<I", zlib.crc32(body))
            try:
                address = decode(altered)
            except FabricError:
                continue
            assert encode(address) == altered
            assert {len(end.parts) for end in address.ends} == {len(address.part_bytes)}
            assert min(address.part_bytes) > 0


@pytest.mark.parametrize("part_bytes", [(), (4096, 0), (1 << 63, 1 << 63), (4096,) * 65])
def test_parts_that_cannot_be_are_refused(descriptor: bytes, part_bytes: tuple[int, ...]) -> None:
    address = decode(descriptor)
    parts = tuple(KeyedPart(0, i) for i in range(len(part_bytes)))
    ends = tuple(dataclasses.replace(end, parts=parts) for end in address.ends)
    with pytest.raises(FabricError, match="make no sense"):
        decode(encode(dataclasses.replace(address, part_bytes=part_bytes, ends=ends)))


def test_another_version_is_named_even_where_all_else_is_right(descriptor: bytes) -> None:
    body = bytearray(descriptor[:-4])
    struct.pack_into("<H", body, 4, 999)
    with pytest.raises(FabricError, match="version 999"):
        decode(bytes(body) + struct.pack("<I", zlib.crc32(body)))


@pytest.mark.parametrize("lie", ["size", "key"])
def test_a_write_that_the_registration_does_not_allow_neither_lands_nor_counts(
    pair: Pair, lie: str
) -> None:
    """Our check of a batch is a courtesy to the caller; the registration is the guard.

    The writer hears nothing of it (measured on tcp and shm): only the count is true.
    """
    half = len(pair.here.memory) // 2
    link = pair.here.fabric.open_link(pair.here.fabric.register(pair.here.memory.ctypes.data, half))
    ours = pair.here.fabric.descriptor(link)
    (part,) = decode(ours).ends[0].parts
    size = {"part_bytes": (2 * half,)}
    changes = size if lie == "size" else {"parts": (KeyedPart(part.base, part.key ^ 1),)}
    peer_link, descriptor = pair.there.open_link()
    pair.here.fabric.connect(link, descriptor)
    pair.there.call("connect", peer_link, _forged(ours, **changes))
    pair.there.wait("LinkUp", link=peer_link)
    pair.there.fill(1)
    pair.here.fabric.expect(link, 5, 1, 1)
    page = half // PAGE_BYTES if lie == "size" else 0
    transfer = pair.there.call("open_transfer", peer_link, 5, 1)
    pair.there.call("write", transfer, dense([page], [page], PAGE_BYTES, 1, 1))
    pair.there.wait_statistic("beats_sent", pair.there.statistics().beats_sent + 2)
    assert pair.here.num_set() == 0
    assert pair.here.fabric.count(5, 1) == 0
    assert_serves(pair.there, pair.here)


def test_a_wrong_key_of_one_part_closes_that_one_alone(pair: Pair) -> None:
    spans = [(0, PAGE_BYTES), (8 * PAGE_BYTES, PAGE_BYTES)]
    pair.here.register_spans(spans)
    link, ours = pair.here.open_link()
    first, second = decode(ours).ends[0].parts
    assert first.key != second.key
    peer_link, descriptor = pair.there.open_link()
    pair.here.fabric.connect(link, descriptor)
    forged = (first, KeyedPart(second.base, second.key ^ 1))
    pair.there.call("connect", peer_link, _forged(ours, parts=forged))
    pair.there.wait("LinkUp", link=peer_link)
    pair.there.fill(1)
    pair.here.fabric.expect(link, 5, 1, 2)
    transfer = pair.there.call("open_transfer", peer_link, 5, 1)
    # The open part first: over tcp a bad key takes along what is behind it on the connection.
    pair.there.call("write", transfer, dense([0], [0], PAGE_BYTES, 1, 1))
    pair.here.wait_count(5, 1, 1)
    pair.there.call("write", transfer, dense([1], [1], PAGE_BYTES, 1, 1))
    pair.there.wait_statistic("beats_sent", pair.there.statistics().beats_sent + 2)
    assert pair.here.fabric.count(5, 1) == 1
    assert pair.here.num_set() == PAGE_BYTES
    assert pair.here.read(0, PAGE_BYTES) == pair.there.read(0, PAGE_BYTES)


def test_a_wrong_key_of_the_link_page_ends_the_link(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(connect_timeout_s=0.5, beat_timeout_s=0.5)
    link, ours = pair.here.open_link()
    peer_link, descriptor = pair.there.open_link()
    pair.here.fabric.connect(link, descriptor)
    forged = _forged(ours, page_key=decode(ours).ends[0].page_key ^ 1)
    pair.there.call("connect", peer_link, forged)
    pair.there.wait("LinkDown", link=peer_link)


def test_a_fenced_links_descriptor_leads_nowhere(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(connect_timeout_s=0.5)
    link, stale = pair.here.open_link()
    pair.here.fabric.fence(link)
    pair.here.wait("Fenced", link=link)
    peer_link, _ = pair.there.open_link()
    pair.there.call("connect", peer_link, stale)
    pair.there.wait("LinkDown", link=peer_link)


def test_an_address_that_nobody_has_is_given_up(
    provider: Provider, make_pair: Callable[..., Pair]
) -> None:
    pair = make_pair(connect_timeout_s=0.5)
    link, _ = pair.here.open_link()
    _, theirs = pair.there.open_link()
    name = bytearray(decode(theirs).ends[0].name)
    if provider == "tcp":
        name[2:4] = struct.pack(">H", 1)  # a port that needs root, and that nobody listens at
    else:
        name[name.index(b"-") + 1 :] = b"nobody-0-0\0"
    pair.here.fabric.connect(link, _forged(theirs, name=bytes(name)))
    pair.here.wait("LinkDown", link=link)
