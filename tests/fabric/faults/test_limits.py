"""What a process cannot have: descriptors, memory. A reason is given, nothing else suffers, and it
heals.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdx.errors import FabricError
from pdx.fabric import FabricOptions
from tests.fabric.faults.network import lacks
from tests.fabric.faults.process import limit_descriptors
from tests.fabric.pairs import Pair
from tests.fabric.sides import Child, RemoteSide, Side, assert_serves

MIB = 1 << 20


@pytest.fixture
def starved() -> Iterator[Pair]:
    """A tcp pair, whose ``there`` the test starves."""
    pair = Pair("tcp", MIB, FabricOptions(connect_timeout_s=20))
    yield pair
    pair.close()


def test_a_connection_without_a_descriptor_for_it_ends_with_that_reason(starved: Pair) -> None:
    _, ours = starved.here.open_link()
    peer_link, _ = starved.there.open_link()
    starved.there.run(limit_descriptors, 0)
    starved.there.call("connect", peer_link, ours)
    down = starved.there.wait("LinkDown", link=peer_link)
    starved.there.run(limit_descriptors, None)
    assert down.code == errno.EMFILE
    assert "Too many open files" in down.reason
    assert_serves(starved.here, starved.there)


def test_a_peer_without_descriptors_is_connected_to_when_it_has_some(starved: Pair) -> None:
    link, ours = starved.here.open_link()
    peer_link, theirs = starved.there.open_link()
    starved.there.run(limit_descriptors, 0)
    starved.here.fabric.connect(link, theirs)
    starved.here.wait_statistic("sleeps", starved.here.statistics().sleeps + 50)
    starved.there.run(limit_descriptors, None)
    starved.there.call("connect", peer_link, ours)
    starved.here.wait("LinkUp", link=link)
    starved.there.wait("LinkUp", link=peer_link)


def _leave_in_shared_memory(side: Side, num_bytes: int) -> None:
    with Path("/dev/shm/other").open("wb") as file:  # empty again
        room = os.statvfs("/dev/shm")
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize - num_bytes)


def test_a_link_that_would_fill_shared_memory_is_refused() -> None:
    """A process whose write into it finds no page is killed (SIGBUS): refusing is all there is."""
    if lack := lacks():
        pytest.skip(lack)
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm; exec "$@"'
    side = RemoteSide("shm", MIB, child=Child(("unshare", "--mount", "sh", "-c", mount, "sh")))
    side.open_link()
    side.run(_leave_in_shared_memory, 15 * MIB)
    with pytest.raises(FabricError, match="/dev/shm has"):
        side.open_link()
    side.run(_leave_in_shared_memory, 20 * MIB)
    side.open_link()
    side.close()


@pytest.mark.parametrize(
    ("address", "num_bytes"),
    [(0, 4096), (4096, 0), ((1 << 64) - 4096, 8192), (-1, 1), (1, 1 << 64)],
)
def test_memory_that_cannot_be_is_not_registered(
    make_pair: Callable[..., Pair], address: int, num_bytes: int
) -> None:
    pair = make_pair()
    with pytest.raises(FabricError):
        pair.here.fabric.register(address, num_bytes)
