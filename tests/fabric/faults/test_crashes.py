"""Processes that end without a word: what they leave is removed, and they may come back."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from pdx.fabric import FabricOptions, open_fabric
from pdx.fabric.descriptor import decode
from tests.fabric.batches import dense
from tests.fabric.pairs import Pair, shm_files
from tests.fabric.sides import Child, RemoteSide, Side, assert_serves, join

MIB = 1 << 20


def _open(side: RemoteSide, peer: Any) -> None:
    side.open_link()


def _half_connected(side: RemoteSide, peer: Any) -> None:
    _, descriptor = peer.open_link()
    side.call("connect", side.open_link()[0], descriptor)


def _connected(side: RemoteSide, peer: Any) -> None:
    join(side, peer)


def _writing(side: RemoteSide, peer: Any) -> None:
    here, there = join(side, peer)
    pages = list(range(16))
    peer.fabric.expect(there, 1, 1, 1000 * len(pages))
    transfer = side.call("open_transfer", here, 1, 1)
    for _ in range(1000):
        side.call("write", transfer, dense(pages, pages[::-1], 64 << 10, 1, 16))
    peer.wait_count(1, 1, 1)


@pytest.mark.parametrize("moment", [_open, _half_connected, _connected, _writing])
def test_what_a_killed_process_left_in_shared_memory_goes_with_the_next_start(
    moment: Callable[[RemoteSide, Any], None],
) -> None:
    pair = Pair("shm", MIB, FabricOptions())
    moment(pair.there, pair.here)
    assert shm_files(pair.there.pid)
    pair.there.kill()
    open_fabric(provider="shm").close()
    assert not shm_files(pair.there.pid)
    pair.close()


def test_a_peer_comes_back_again_and_again_with_new_addresses_and_keys(pair: Pair) -> None:
    pair.here.fill(1)
    descriptors = set()
    peer = pair.there
    for _ in range(2):
        link, ours = pair.here.open_link()
        peer_link, theirs = peer.open_link()
        descriptors |= {ours, theirs}
        pair.here.fabric.connect(link, theirs)
        peer.call("connect", peer_link, ours)
        pair.here.wait("LinkUp", link=link)
        assert_serves(pair.here, peer)
        following = pair.another()  # before the end of this one, so with another process id
        peer.kill()
        pair.here.fabric.fence(link)
        pair.here.wait("Fenced", link=link)
        peer = following
    assert len(descriptors) == 4
    assert_serves(pair.here, peer)


def _address(descriptor: bytes) -> tuple[str, int]:
    """Where a tcp link listens: its one end's name is a sockaddr_in."""
    [end] = decode(descriptor).ends
    port, host = struct.unpack_from("!2xH4s", end.name)
    return socket.inet_ntoa(host), port


def _connection_request() -> bytes:
    """What libfabric's tcp says first (xnet_proto.h): a control header, then the RDM's message."""
    return struct.pack("!BBHIQQ", 3, 0, 8, 0, 0, 0) + struct.pack("=Q", 1) + bytes(8)


def test_who_connects_and_speaks_only_after_the_fence_ends_no_process() -> None:
    """libfabric (1.17 to 2.5) reads the request into an endpoint that it has freed; the allocator
    of the process here overwrites what is freed, so that it cannot go well by chance.
    """
    perturbed = Child(("env", "MALLOC_PERTURB_=165"))
    here, there = Side("tcp", MIB), RemoteSide("tcp", MIB, child=perturbed)
    with contextlib.closing(here), contextlib.closing(there):
        link, descriptor = there.open_link()
        with socket.create_connection(_address(descriptor)) as stranger:
            assert_serves(here, there)  # its worker has taken the connection by now
            there.call("fence", link)
            there.wait("Fenced", link=link)
            with contextlib.suppress(ConnectionError):
                stranger.send(_connection_request())
            assert_serves(here, there)
