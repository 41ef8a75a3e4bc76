"""Which setting is to blame, from the addresses alone."""

from __future__ import annotations

import errno
import socket
import struct

import pytest

from pdx.fabric.descriptor import KeyedPart, LinkAddress, LinkEnd, encode, hosts
from pdx.messenger.data_path import DataPath, may_heal

A, B, OTHER = "10.0.0.1", "10.0.0.2", "10.9.9.9"


def path(own: list[str], peer: list[str]) -> DataPath:
    return DataPath(
        own_role="decoder",
        peer_role="prefiller",
        own_hosts=own,
        peer_hosts=peer,
        own_control_host=A,
        peer_control_host=B,
    )


@pytest.mark.parametrize(
    ("own", "peer", "hint"),
    [
        ([A], [OTHER], "change --fabric-bind of the prefiller:"),
        ([A], [B, OTHER], "change --fabric-bind of the prefiller:"),
        ([OTHER], [B], "change --fabric-bind of the decoder:"),
        (["fd00::1"], [OTHER], "change --fabric-bind of the prefiller or --fabric-bind of the dec"),
        ([A], [B], "does a firewall close other ports?"),
    ],
)
def test_an_address_that_is_not_the_control_connections_was_asked_for(
    own: list[str], peer: list[str], hint: str
) -> None:
    found = path(own, peer)
    assert hint in str(found.hint)
    assert all(host in found.whose for host in (*own, *peer))
    assert found.whose.count("by its --fabric-bind") == str(found.hint).count("--fabric-bind")


def test_without_addresses_there_is_nothing_to_say() -> None:
    """Over shm."""
    assert path([], []).hint is None
    assert path([], []).whose == ""


def test_only_what_ran_out_may_be_there_the_next_time() -> None:
    assert may_heal(errno.EMFILE) and may_heal(errno.ENOSPC)
    assert not may_heal(errno.ENETUNREACH) and not may_heal(errno.ETIMEDOUT) and not may_heal(None)


def test_a_descriptor_shows_its_addresses() -> None:
    ipv4 = struct.pack("=H", socket.AF_INET) + b"\x1b\x59" + socket.inet_aton(A) + bytes(8)
    packed = socket.inet_pton(socket.AF_INET6, "fd00::1")
    ipv6 = struct.pack("=H", socket.AF_INET6) + b"\x1b\x59" + bytes(4) + packed + bytes(4)
    names = [ipv4, ipv6, b"fi_shm://pdx-fabric-1-2-3\0", ipv4[:6]]
    ends = tuple(
        LinkEnd(parts=(KeyedPart(0, 1),), page_base=0, page_key=2, name=name) for name in names
    )
    link = LinkAddress(
        provider="tcp", part_bytes=(4096,), pid_namespace=1, window=8, probe_tag=3, pid=4, ends=ends
    )
    assert hosts(encode(link)) == (A, "fd00::1")
