"""Opening and connecting links: what is refused, what the limits are, what an idle one costs."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pdx.errors import FabricError
from pdx.fabric import FabricOptions, Provider, library_info, open_fabric
from tests.fabric.batches import dense
from tests.fabric.sides import Side, join


def test_descriptors_that_are_cut_or_altered_are_refused(pair: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    link, _ = pair.here.open_link()
    _, descriptor = pair.there.open_link()
    broken = [b"", descriptor + b"x"]
    broken += [descriptor[:length] for length in range(1, len(descriptor), 5)]
    for _ in range(30):
        altered = bytearray(descriptor)
        altered[int(rng.integers(len(altered)))] ^= int(rng.integers(1, 256))
        broken.append(bytes(altered))
    for bad in broken:
        with pytest.raises(FabricError):
            pair.here.fabric.connect(link, bad)
    pair.here.fabric.connect(link, descriptor)
    with pytest.raises(FabricError, match="connected already"):
        pair.here.fabric.connect(link, descriptor)


def test_a_descriptor_of_another_provider_is_refused() -> None:
    tcp, shm = Side("tcp", 4096), Side("shm", 4096)
    try:
        link, descriptor = tcp.open_link()
        other, other_descriptor = shm.open_link()
        with pytest.raises(FabricError, match="the peer's link is tcp, ours is shm"):
            shm.fabric.connect(other, descriptor)
        with pytest.raises(FabricError, match="the peer's link is shm, ours is tcp"):
            tcp.fabric.connect(link, other_descriptor)
    finally:
        tcp.close()
        shm.close()


def test_shm_within_one_process_is_refused() -> None:
    a, b = Side("shm", 4096), Side("shm", 4096)
    try:
        link, _ = a.open_link()
        _, descriptor = b.open_link()
        with pytest.raises(FabricError, match="two processes"):
            a.fabric.connect(link, descriptor)
    finally:
        a.close()
        b.close()


def test_a_peer_that_does_not_connect_back_is_given_up(make_pair: Callable[..., Any]) -> None:
    pair = make_pair(connect_timeout_s=0.3)
    link, _ = pair.here.open_link()
    _, descriptor = pair.there.open_link()
    pair.here.fabric.connect(link, descriptor)
    transfer = pair.here.fabric.open_transfer(link, 1, 1)
    pair.here.fabric.write(transfer, dense([0], [0], 64, 1, 4))
    assert "within 0.3 s" in pair.here.wait("LinkDown", link=link).reason
    assert pair.here.wait("TransferDone", transfer=transfer).failed
    assert pair.there.statistics().imms_reaped == 0


def test_a_peer_that_is_gone_is_refused_or_given_up(
    provider: str, make_pair: Callable[..., Any]
) -> None:
    pair = make_pair(connect_timeout_s=1.0)
    link, _ = pair.here.open_link()
    _, descriptor = pair.there.open_link()
    pair.there.kill()
    if provider == "shm":
        with pytest.raises(FabricError, match="gone"):
            pair.here.fabric.connect(link, descriptor)
    else:
        pair.here.fabric.connect(link, descriptor)
        pair.here.wait("LinkDown", link=link)


def test_transfers_need_a_connected_link(pair: Any) -> None:
    link, _ = pair.here.open_link()
    with pytest.raises(FabricError, match="not connected"):
        pair.here.fabric.open_transfer(link, 1, 1)
    with pytest.raises(FabricError, match="not open"):
        pair.here.fabric.open_transfer(link + 100, 1, 1)


def test_a_transfer_on_a_lost_link_fails_at_once(pair: Any) -> None:
    here, _ = join(pair.here, pair.there)
    pair.there.kill()
    pair.here.wait("LinkDown")
    transfer = pair.here.fabric.open_transfer(here, 1, 1)
    assert pair.here.wait("TransferDone", transfer=transfer).failed


def test_a_region_in_use_is_not_unregistered(pair: Any) -> None:
    here, _ = join(pair.here, pair.there)
    with pytest.raises(FabricError, match="still used by 1 links"):
        pair.here.fabric.unregister(pair.here.region)
    pair.here.fabric.fence(here)
    pair.here.wait("Fenced")
    pair.here.fabric.unregister(pair.here.region)
    with pytest.raises(FabricError, match="not registered"):
        pair.here.fabric.unregister(pair.here.region)
    with pytest.raises(FabricError, match="not registered"):
        pair.here.fabric.open_link(pair.here.region)


@pytest.mark.parametrize("window", [0, -1, 65537])
def test_windows_that_make_no_sense_are_refused(pair: Any, window: int) -> None:
    with pytest.raises(FabricError, match="window"):
        pair.here.fabric.open_link(pair.here.region, window=window)


def test_links_beyond_the_completion_queue_are_refused(make_pair: Callable[..., Any]) -> None:
    pair = make_pair(queue_entries=1200)
    first, _ = pair.here.open_link(window=256)
    pair.here.open_link(window=256)
    with pytest.raises(FabricError, match="completion queue of 1200"):
        pair.here.open_link(window=256)
    pair.here.fabric.fence(first)
    pair.here.wait("Fenced")
    pair.here.open_link(window=256)


def test_two_hundred_links_carry_pages(pair: Any) -> None:
    pair.here.fill(1)
    ours = [pair.here.open_link() for _ in range(200)]
    theirs = [pair.there.open_link() for _ in range(200)]
    for (here, here_descriptor), (there, there_descriptor) in zip(ours, theirs, strict=True):
        pair.here.fabric.connect(here, there_descriptor)
        pair.there.call("connect", there, here_descriptor)
    for slot, ((here, _), (there, _)) in enumerate(zip(ours, theirs, strict=True), 1):
        pair.there.call("expect", there, slot, 1, 1)
        transfer = pair.here.fabric.open_transfer(here, slot, 1)
        pair.here.fabric.write(transfer, dense([slot], [slot], 64, 1, 256))
        pair.here.fabric.seal(transfer)
    for slot in range(1, 201):
        pair.there.wait("Arrived", slot=slot)
    assert pair.there.read(64, 200 * 64) == pair.here.read(64, 200 * 64)
    assert pair.here.statistics().links_up == 200


def test_running_out_of_descriptors_is_an_error_and_heals() -> None:
    side = Side("tcp", 4096)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    links = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (side.fabric.fileno() + 40, hard))
        refused = False
        while not refused and len(links) < 100:
            try:
                links.append(side.open_link()[0])
            except FabricError:
                refused = True
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert links
    assert refused
    for link in links:
        side.fabric.fence(link)
        side.wait("Fenced", link=link)
    side.open_link()
    side.close()


def test_an_idle_link_sleeps(provider: Provider, pair: Any) -> None:
    join(pair.here, pair.there)
    before = pair.here.statistics()
    cpu_before = pair.there.cpu_s()
    pair.here.wait_statistic("beats_sent", before.beats_sent + 4)  # one second
    # A descriptor wakes for beats only; a queue without one is looked at every 20 ms.
    limit = 30 if library_info().providers[provider] == "tcp" else 80
    assert pair.here.statistics().sleeps - before.sleeps < limit
    assert pair.there.cpu_s() - cpu_before < 0.1


def test_tcp_works_over_ipv6() -> None:
    a, b = Side("tcp", 4096, bind_host="::1"), Side("tcp", 4096, bind_host="::1")
    try:
        here, there = join(a, b)
        a.fill(1)
        b.fabric.expect(there, 1, 1, 4)
        transfer = a.fabric.open_transfer(here, 1, 1)
        a.fabric.write(transfer, dense([0, 1, 2, 3], [3, 2, 1, 0], 1024, 1, 4))
        b.wait("Arrived")
        assert b.read(0, 1024) == a.read(3072, 1024)
    finally:
        a.close()
        b.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_address_is_refused(host: str) -> None:
    with pytest.raises(FabricError, match="one address"):
        open_fabric(provider="tcp", bind_host=host)


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(FabricError, match=r"192\.0\.2\.1"):
        open_fabric(provider="tcp", bind_host="192.0.2.1")


def test_a_core_that_does_not_exist_is_refused() -> None:
    with pytest.raises(FabricError, match="pinned to core 1023"):
        open_fabric(provider="tcp", options=FabricOptions(cpu=1023))


def test_library_info_names_what_is_used() -> None:
    info = library_info()
    assert info.providers["shm"] == "shm"
    assert info.providers["tcp"] in ("tcp", "net")
    assert info.version
