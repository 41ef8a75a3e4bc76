"""A network that is cut, slow or careless with packets, between two hosts."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from tests.fabric.batches import dense
from tests.fabric.faults.network import Cable, Hosts, Relay, inside
from tests.fabric.faults.process import congestion_controls, default_congestion_control
from tests.fabric.sides import RemoteSide, assert_serves, join

MIB = 1 << 20
PAGE_BYTES = 64 << 10
NUM_PAGES = 128


def _write_all(writer: RemoteSide, link: int) -> int:
    """All pages to the same places of the peer, slot 5."""
    pages = list(range(NUM_PAGES))
    transfer: int = writer.call("open_transfer", link, 5, 1)
    writer.call("write", transfer, dense(pages, pages, PAGE_BYTES, 1, NUM_PAGES))
    writer.call("seal", transfer)
    return transfer


def _wait_beats(side: RemoteSide, count: int) -> None:
    side.wait_statistic("beats_sent", side.statistics().beats_sent + count)


@pytest.mark.parametrize("nonlocal_bind", [0, 1])
def test_another_host_is_written_to_with_the_congestion_control_that_is_set_here(
    hosts: Hosts, cable: Cable, nonlocal_bind: int
) -> None:
    """Also where the system lets a socket be bound to an address of another host."""
    if default_congestion_control() == "reno":
        pytest.skip("reno is this host's default")
    for pid in hosts.pids:
        inside(pid, f"echo {nonlocal_bind} > /proc/sys/net/ipv4/ip_nonlocal_bind")
    a, b = hosts.sides(cable, NUM_PAGES * PAGE_BYTES)
    join(a, b)
    assert a.run(congestion_controls) == {default_congestion_control()}
    assert b.run(congestion_controls) == {default_congestion_control()}


def test_a_cut_that_is_mended_before_the_beats_run_out_loses_nothing(
    hosts: Hosts, cable: Cable
) -> None:
    a, b = hosts.sides(cable, NUM_PAGES * PAGE_BYTES, beat_timeout_s=20)
    here, there = join(a, b)
    a.fill(1)
    b.call("expect", there, 5, 1, NUM_PAGES)
    cable.cut()
    transfer = _write_all(a, here)
    _wait_beats(b, 2)
    assert b.call("count", 5, 1) < NUM_PAGES
    cable.mend()
    b.wait("Arrived", slot=5)
    a.wait("TransferDone", transfer=transfer, code=0)
    assert b.read() == a.read()
    assert not a.pending()
    assert not b.pending()


def test_a_cut_ends_the_link_on_both_sides_and_what_it_held_up_does_not_land(
    hosts: Hosts, cable: Cable
) -> None:
    a, b = hosts.sides(cable, NUM_PAGES * PAGE_BYTES, beat_timeout_s=1)
    here, there = join(a, b)
    a.fill(1)
    b.call("expect", there, 5, 1, NUM_PAGES)
    cable.cut()
    transfer = _write_all(a, here)
    assert b.wait("LinkDown", link=there).code == errno.ETIMEDOUT
    assert a.wait("LinkDown", link=here).code == errno.ETIMEDOUT
    b.call("fence", there)
    b.wait("Fenced", link=there)
    b.zero()
    cable.mend()
    # The writer's kernel sends on. Its new link shares the cable with that, and works.
    assert_serves(a, b)
    a.call("fence", here)
    assert a.wait("TransferDone", transfer=transfer).failed
    a.wait("Fenced", link=here)
    assert b.num_set() == 4096


def test_a_slow_link_keeps_its_beats_and_carries_everything(hosts: Hosts, relay: Relay) -> None:
    a, b = hosts.sides(relay, NUM_PAGES * PAGE_BYTES)
    relay.set(delay_s=0.005, bits_per_s=50e6)
    here, there = join(a, b)
    a.fill(1)
    b.call("expect", there, 5, 1, NUM_PAGES)
    transfer = _write_all(a, here)
    arrived = b.wait("Arrived", slot=5)
    done = a.wait("TransferDone", transfer=transfer, code=0)
    # 8 MiB at this rate. The writer's beats wait behind its pages.
    assert arrived.arrival_ns[-1] - done.first_post_ns > 1_000_000_000
    assert b.read() == a.read()
    assert not a.pending()
    assert not b.pending()


def test_a_network_that_loses_doubles_and_reorders_packets_does_not_show(
    hosts: Hosts, relay: Relay
) -> None:
    a, b = hosts.sides(relay, NUM_PAGES * PAGE_BYTES)
    relay.set(delay_s=0.001, loss=0.01, double=0.01, reorder=0.02)
    here, there = join(a, b)
    a.fill(1)
    order = np.random.default_rng(1).permutation(NUM_PAGES).tolist()
    b.call("expect", there, 5, 1, NUM_PAGES)
    transfer = a.call("open_transfer", here, 5, 1)
    a.call("write", transfer, dense(order, order, PAGE_BYTES, 1, NUM_PAGES))
    a.call("seal", transfer)
    b.wait("Arrived", slot=5)
    assert b.read() == a.read()
    done = relay.set()
    assert min(done["lost"], done["doubled"], done["reordered"]) > 0
    assert not b.pending()
