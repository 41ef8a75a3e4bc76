"""What the simulated network adds: its faults, its clock, and how its events are noticed."""

from __future__ import annotations

import errno
import random
import select
from typing import Any

import pytest

from pdx.errors import FabricError
from pdx.fabric import Fabric, FabricOptions, Provider
from pdx.lab.simulated_fabric import Conditions, Imm, ImmLayout, SimulatedFabric, SimulatedNetwork
from tests.fabric.batches import dense
from tests.fabric.conformance.simulated_pair import SimulatedPair
from tests.fabric.conformance.virtual_clock import VirtualClock
from tests.fabric.sides import join

PAGES = list(range(0, 400, 2))


def _pair(
    seed: int, provider: Provider = "tcp", conditions: Conditions | None = None, **room: Any
) -> SimulatedPair:
    return SimulatedPair(seed, provider, 1 << 20, FabricOptions(), conditions, **room)


def _send(pair: SimulatedPair, link: int, *, slot: int = 1) -> int:
    """Write PAGES, and return the transfer."""
    transfer = pair.here.fabric.open_transfer(link, slot, 1)
    pair.here.fabric.write(transfer, dense(PAGES, PAGES, 64, 1, 4096))
    pair.here.fabric.seal(transfer)
    return transfer


def test_it_has_the_face_of_a_fabric(seed: int) -> None:
    fabric: Fabric = _pair(seed).here.fabric
    assert fabric.provider == "tcp"


@pytest.mark.parametrize("layout", [ImmLayout(), ImmLayout(slot_bits=2, generation_bits=2)])
def test_immediates_say_what_they_were_given(layout: ImmLayout) -> None:
    for slot in (1, layout.max_slot):
        for generation in (0, layout.max_generation):
            for atoms in (1, layout.max_atoms):
                imm = Imm(slot=slot, generation=generation, atoms=atoms)
                assert layout.decode(layout.encode(imm)) == imm
    assert ImmLayout().encode(Imm(slot=4095, generation=4095, atoms=256)) == 0xFFFFFFFF


def test_small_immediates_refuse_large_pairs(seed: int) -> None:
    pair = _pair(seed, imm_layout=ImmLayout(slot_bits=2, generation_bits=2))
    here, _ = join(pair.here, pair.there)
    pair.here.fabric.expect(here, 3, 3, 1)
    for slot, generation in ((4, 0), (1, 4)):
        with pytest.raises(FabricError, match="slots are 1 to 3, generations 0 to 3"):
            pair.here.fabric.expect(here, slot, generation, 1)


def test_over_tcp_completions_overtake_the_data(seed: int) -> None:
    slow = Conditions(wire_ns=(50_000_000, 60_000_000))
    pair = _pair(seed, conditions=slow)
    here, there = join(pair.here, pair.there)
    pair.here.memory[:] = 7
    pair.there.fabric.expect(there, 1, 1, len(PAGES))
    transfer = _send(pair, here)
    pair.here.wait("TransferDone", transfer=transfer)
    assert pair.there.num_set() == 0
    pair.there.wait("Arrived")
    assert pair.there.num_set() == len(PAGES) * 64


def test_over_shm_completions_follow_the_data(seed: int) -> None:
    pair = _pair(seed, "shm")
    here, there = join(pair.here, pair.there)
    pair.here.memory[:] = 7
    pair.there.fabric.expect(there, 1, 1, len(PAGES))
    pair.here.wait("TransferDone", transfer=_send(pair, here))
    assert pair.there.num_set() == len(PAGES) * 64


def test_writes_land_in_another_order_than_they_were_posted(seed: int) -> None:
    pair = _pair(seed)
    landed: list[int] = []
    pair.network.on_landing = lambda landing: landed.append(landing.write.pieces[0].dst_offset)
    here, there = join(pair.here, pair.there)
    pair.there.fabric.expect(there, 1, 1, len(PAGES))
    _send(pair, here)
    pair.there.wait("Arrived")
    assert landed != sorted(landed)


def test_credit_stays_within_the_window_of_a_receiver_that_does_not_count(seed: int) -> None:
    pair = _pair(seed)
    here, _ = join(pair.here, pair.there, window=3)
    pair.there.stop()
    _send(pair, here)
    pair.clock.advance(1_000_000_000)
    assert pair.here.statistics().writes_posted == 3


def test_a_reset_may_lose_what_was_reported_good(seed: int) -> None:
    pair = _pair(seed)
    here, there = join(pair.here, pair.there)
    pair.there.fabric.expect(there, 1, 1, len(PAGES))
    transfer = _send(pair, here)
    pair.here.wait_statistic("writes_posted", 50)
    pair.network.reset("node-0", "node-1", lost=True, reported_failed=False, reconnects=True)
    done = pair.here.wait("TransferDone", transfer=transfer)
    assert (done.posted_atoms, done.failed) == (len(PAGES), False)
    pair.clock.advance(5_000_000_000)
    assert pair.there.fabric.count(1, 1) < len(PAGES)
    assert not pair.here.pending() + pair.there.pending(), "nobody hears of it: the count is short"


def test_a_reset_may_report_failed_what_arrives(seed: int) -> None:
    pair = _pair(seed, conditions=Conditions(completion_ns=(500_000, 600_000)))
    here, there = join(pair.here, pair.there)
    pair.there.fabric.expect(there, 1, 1, len(PAGES))
    transfer = _send(pair, here)
    pair.here.wait_statistic("writes_posted", 50)
    pair.network.reset("node-0", "node-1", lost=False, reported_failed=True, reconnects=True)
    pair.there.wait("Arrived", atoms=len(PAGES))
    pair.here.wait("LinkDown", link=here, code=errno.ECONNRESET)
    done = pair.here.wait("TransferDone", transfer=transfer)
    assert done.failed_atoms == len(PAGES)


def test_a_connection_that_stays_broken_ends_the_link_on_both_sides(seed: int) -> None:
    pair = _pair(seed)
    join(pair.here, pair.there)
    pair.network.reset("node-0", "node-1", reconnects=False)
    for side in (pair.here, pair.there):
        side.wait("LinkDown", code=errno.ECONNRESET, timeout_s=0.6)


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_a_cut_off_peer_is_lost_and_its_writes_land_after_the_mend(
    seed: int, provider: Provider
) -> None:
    pair = _pair(seed, provider)
    here, there = join(pair.here, pair.there)
    pair.there.fabric.expect(there, 1, 1, len(PAGES))
    pair.network.partition("node-0", "node-1")
    _send(pair, here)
    for side in (pair.here, pair.there):
        side.wait("LinkDown", timeout_s=2.5)
    assert pair.there.fabric.count(1, 1) == 0
    pair.network.mend("node-0", "node-1")
    pair.there.wait("Arrived", atoms=len(PAGES))


def test_what_was_cut_off_does_not_land_after_the_fence(seed: int) -> None:
    pair = _pair(seed)
    here, there = join(pair.here, pair.there)
    pair.here.memory[:] = 7
    pair.network.partition("node-0", "node-1")
    _send(pair, here)
    pair.there.wait("LinkDown")
    pair.there.fabric.fence(there)
    pair.there.wait("Fenced")
    pair.network.mend("node-0", "node-1")
    pair.clock.advance(5_000_000_000)
    assert pair.there.num_set() == 0


def test_a_lost_link_ends_its_transfers_before_any_fence(seed: int) -> None:
    pair = _pair(seed)
    here, _ = join(pair.here, pair.there)
    transfer = pair.here.fabric.open_transfer(here, 1, 1)
    pair.here.arm(transfer, dense([0], [0], 64, 1, 16), first_value=1)
    pair.clock.advance(1_000_000)  # the worker has it: one that comes after the loss has no peer
    pair.there.kill()
    down = pair.here.wait("LinkDown", link=here)
    assert pair.here.wait("TransferDone", transfer=transfer).code == down.code


def test_a_writer_killed_in_mid_write_leaves_a_short_count(seed: int) -> None:
    pair = _pair(seed, "shm")
    here, there = join(pair.here, pair.there)
    pair.there.fabric.expect(there, 1, 1, len(PAGES))
    _send(pair, here)
    pair.there.wait_count(1, 1, 1)
    pair.here.kill()
    count = pair.there.fabric.count(1, 1)
    pair.there.wait("LinkDown", timeout_s=2.5)
    assert count <= pair.there.fabric.count(1, 1) < len(PAGES)


def test_a_killed_nodes_name_serves_again_as_a_new_process(seed: int) -> None:
    pair = _pair(seed, "shm")
    here, _ = join(pair.here, pair.there)
    pair.there.kill()
    again = SimulatedFabric(pair.network, "node-1", provider="shm")
    region = again.register(pair.there.address, 1 << 20)
    link = again.open_link(region)
    fresh, descriptor = pair.here.open_link()
    pair.here.fabric.connect(fresh, again.descriptor(link))
    again.connect(link, descriptor)
    pair.here.wait("LinkUp", link=fresh)
    pair.here.wait("LinkDown", link=here)


def test_a_lost_completion_ends_with_the_fence(seed: int) -> None:
    pair = _pair(seed, conditions=Conditions(completion_loss_rate=1.0))
    here, there = join(pair.here, pair.there)
    pair.there.fabric.expect(there, 1, 1, len(PAGES))
    transfer = _send(pair, here)
    pair.there.wait("Arrived")
    pair.clock.advance(5_000_000_000)
    assert not pair.here.pending()
    pair.here.fabric.fence(here)
    done = pair.here.wait("TransferDone", transfer=transfer)
    assert (done.code, done.failed_atoms) == (errno.ECANCELED, len(PAGES))


def test_posts_that_are_refused_are_tried_again(seed: int) -> None:
    pair = _pair(seed, conditions=Conditions(refusal_rate=0.5))
    here, there = join(pair.here, pair.there)
    pair.there.fabric.expect(there, 1, 1, len(PAGES))
    _send(pair, here)
    pair.there.wait("Arrived")
    assert pair.here.statistics().eagain > 0


def test_a_network_that_takes_nothing_ends_the_link(seed: int) -> None:
    pair = _pair(seed)
    here, _ = join(pair.here, pair.there)
    pair.network.conditions = Conditions(refusal_rate=1.0)
    transfer = _send(pair, here)
    assert pair.here.wait("TransferDone", transfer=transfer).failed


def test_a_slow_link_takes_longer(seed: int) -> None:
    times = []
    for slowness in (1.0, 50.0):
        pair = _pair(seed)
        here, there = join(pair.here, pair.there)
        pair.network.slow("node-0", "node-1", slowness)
        pair.there.fabric.expect(there, 1, 1, len(PAGES))
        since = pair.now_ns()
        _send(pair, here)
        pair.there.wait("Arrived")
        times.append(pair.now_ns() - since)
    assert times[1] > 10 * times[0]


def test_bytes_take_the_time_of_the_bandwidth(seed: int) -> None:
    pair = _pair(seed, conditions=Conditions(bytes_per_s=1e6))
    here, there = join(pair.here, pair.there)
    pair.there.fabric.expect(there, 1, 1, len(PAGES))
    since = pair.now_ns()
    _send(pair, here)
    pair.there.wait("Arrived")
    assert len(PAGES) * 64 * 1000 <= pair.now_ns() - since < 2 * len(PAGES) * 64 * 1000


def test_the_descriptor_is_readable_while_there_are_events(seed: int) -> None:
    pair = _pair(seed)
    fd = pair.here.fabric.fileno()
    assert not select.select([fd], [], [], 0)[0]
    here, _ = join(pair.here, pair.there)
    pair.here.fabric.expect(here, 1, 1, 0)
    assert select.select([fd], [], [], 0)[0]
    assert pair.here.fabric.events()
    assert not select.select([fd], [], [], 0)[0]
    pair.close()


def test_a_listener_hears_of_events_later_and_not_while_the_node_is_stopped(seed: int) -> None:
    pair = _pair(seed)
    here, _ = join(pair.here, pair.there)
    heard: list[Any] = []
    pair.here.fabric.on_events(lambda: heard.extend(pair.here.fabric.events()))
    pair.here.fabric.expect(here, 1, 1, 0)
    assert not heard
    pair.here.stop()
    pair.clock.advance(1_000_000)
    assert not heard
    pair.here.resume()
    pair.clock.advance(1_000_000)
    assert [event.slot for event in heard] == [1]


def test_memory_that_is_not_mapped_is_refused(seed: int) -> None:
    network = SimulatedNetwork(random.Random(seed), VirtualClock())
    fabric = SimulatedFabric(network, "node-0")
    address = network.memory.map(bytearray(4096))
    for bad in ((address, 4097), (address - 1, 8), (1 << 40, 1)):
        with pytest.raises(FabricError, match="not mapped"):
            fabric.register(*bad)
    network.memory.unmap(address)
    with pytest.raises(FabricError, match="not mapped"):
        fabric.register(address, 4096)
