"""Opening and connecting links: what is refused, what the limits are, what an idle one costs."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from pdx.errors import FabricError
from pdx.fabric import FabricOptions, Provider, library_info, open_fabric
from tests.fabric.batches import dense
from tests.fabric.faults.process import congestion_controls, default_congestion_control
from tests.fabric.sides import Side, join


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


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_within_one_host_are_not_paced(host: str) -> None:
    if default_congestion_control() == "reno":
        pytest.skip("reno is this host's default")
    a, b = Side("tcp", 4096, bind_host=host), Side("tcp", 4096, bind_host=host)
    try:
        join(a, b)
        assert congestion_controls(a) == {"reno"}
    finally:
        a.close()
        b.close()


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
