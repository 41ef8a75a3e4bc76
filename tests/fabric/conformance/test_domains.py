"""Several domains a side, also unequal numbers: one link over all of them, on tcp and simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdx.errors import FabricError
from pdx.fabric import FabricOptions, open_fabric
from pdx.fabric import descriptor as descriptors
from tests.fabric.batches import apply, dense, random_batch
from tests.fabric.conformance.simulated_pair import SimulatedPair
from tests.fabric.sides import join

MIB = 1 << 20


@pytest.fixture(params=["tcp", "simulated-tcp"])
def system(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(params=[(2, 1), (1, 2), (2, 2), (3, 2)], ids=lambda d: f"{d[0]}x{d[1]}")
def domains(request: pytest.FixtureRequest) -> tuple[int, int]:
    chosen: tuple[int, int] = request.param
    return chosen


two_by_two = pytest.mark.parametrize("domains", [(2, 2)], ids=["2x2"], indirect=True)


def test_pages_land_byte_for_byte_and_every_domain_carries_some(pair: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    here, there = join(pair.here, pair.there)
    pair.here.fill(seed)
    for slot in range(1, 5):
        pair.there.zero()
        expected = np.zeros(len(pair.here.memory), np.uint8)
        batch = random_batch(rng, len(expected))
        apply(batch, pair.here.memory, expected)
        pair.there.call("expect", there, slot, 3, batch.num_atoms)
        transfer = pair.here.fabric.open_transfer(here, slot, 3)
        pair.here.fabric.write(transfer, batch)
        pair.here.fabric.seal(transfer)
        assert pair.there.wait("Arrived", slot=slot).atoms == batch.num_atoms
        assert pair.there.read() == expected.tobytes()
        done = pair.here.wait("TransferDone", transfer=transfer)
        assert (done.posted_atoms, done.failed) == (batch.num_atoms, False)
    pages = list(range(0, 200, 2))
    pair.there.call("expect", there, 9, 3, len(pages))
    transfer = pair.here.fabric.open_transfer(here, 9, 3)
    pair.here.fabric.write(transfer, dense(pages, pages, 64, 1, 1024))
    pair.there.wait("Arrived", slot=9)
    assert all(domain.bytes_posted > 0 for domain in pair.here.domain_statistics())
    assert all(domain.imms_reaped > 0 for domain in pair.there.domain_statistics())
    total = sum(domain.writes_posted for domain in pair.here.domain_statistics())
    assert total == pair.here.statistics().writes_posted


def test_credit_is_each_domains_own(make_pair: Callable[..., Any]) -> None:
    """The receiver is stopped: its windows fill, one for each of its domains."""
    pair = make_pair()
    here, there = join(pair.here, pair.there, window=4)
    pages = list(range(0, 2000, 2))
    pair.there.call("expect", there, 1, 1, len(pages))
    num_domains = len(pair.there.domain_statistics())
    pair.there.stop()
    before = pair.here.statistics()
    transfer = pair.here.fabric.open_transfer(here, 1, 1)
    pair.here.fabric.write(transfer, dense(pages, pages, 64, 1, 8192))
    pair.here.wait_statistic("writes_posted", 4 * num_domains)
    pair.here.wait_statistic("beats_sent", before.beats_sent + 2)
    assert pair.here.statistics().writes_posted == 4 * num_domains
    pair.there.resume()
    pair.there.wait("Arrived")


@two_by_two
def test_no_byte_lands_after_a_fence_of_all_domains(make_pair: Callable[..., Any]) -> None:
    pair = make_pair(32 * MIB)
    here, there = join(pair.here, pair.there)
    pair.here.memory[:] = 7
    pages = list(range(512))
    pair.there.call("expect", there, 5, 1, len(pages))
    transfer = pair.here.fabric.open_transfer(here, 5, 1)
    pair.here.fabric.write(transfer, dense(pages, pages, 64 * 1024, 1, len(pages)))
    pair.there.wait_count(5, 1, 64)
    pair.there.call("fence", there)
    pair.there.wait("Fenced")
    pair.there.zero()
    pair.here.wait("LinkDown", link=here)
    pair.here.fabric.fence(here)
    assert pair.here.wait("TransferDone", transfer=transfer).failed
    pair.here.wait("Fenced")
    assert pair.there.num_set() == 0


@two_by_two
def test_a_killed_peer_is_one_link_down(pair: Any) -> None:
    here, _ = join(pair.here, pair.there)
    transfer = pair.here.fabric.open_transfer(here, 5, 1)
    pages = list(range(0, 4000, 2))
    pair.here.fabric.write(transfer, dense(pages, pages, 64, 1, 8192))
    pair.there.kill()
    pair.here.wait("LinkDown", link=here)
    pair.here.fabric.fence(here)
    pair.here.wait("Fenced", link=here)
    assert pair.here.wait("TransferDone", transfer=transfer, timeout_s=0).failed
    assert not pair.here.pending()


@two_by_two
def test_a_link_needs_every_domain_of_the_peer(make_pair: Callable[..., Any]) -> None:
    """One address of the descriptor leads nowhere: its probe fails, and the link is not up."""
    pair = make_pair(connect_timeout_s=1.0)
    link, ours = pair.here.open_link()
    peer_link, theirs = pair.there.open_link()
    gone, gone_descriptor = pair.there.open_link()
    pair.there.call("fence", gone)
    pair.there.wait("Fenced", link=gone)
    address = descriptors.decode(theirs)
    nowhere = descriptors.decode(gone_descriptor).ends[1]
    altered = replace(address, ends=(address.ends[0], nowhere))
    pair.here.fabric.connect(link, descriptors.encode(altered))
    pair.there.call("connect", peer_link, ours)
    pair.here.wait("LinkDown", link=link)
    pair.there.wait("LinkDown", link=peer_link)


def test_every_way_between_domains_beats(seed: int) -> None:
    """One way of three goes silent, and the link is lost, although the others beat."""
    pair = SimulatedPair(seed, "tcp", MIB, FabricOptions(), domains=(3, 2))
    try:
        here, _ = join(pair.here, pair.there)
        pair.clock.advance(3_000_000_000)
        assert not pair.here.pending() + pair.there.pending()
        pair.network.cut(pair.there.name, pair.here.name, domain=1)
        assert "no beat" in pair.here.wait("LinkDown", link=here).reason
        assert not pair.there.pending(), "what it hears is complete"
    finally:
        pair.close()


@pytest.mark.parametrize("hosts", [["127.0.0.1"] * 2, [f"127.0.0.{i}" for i in range(1, 10)]])
def test_addresses_are_different_and_at_most_eight(hosts: list[str]) -> None:
    with pytest.raises(FabricError, match="up to 8 different addresses"):
        open_fabric(provider="tcp", bind_host=hosts)
