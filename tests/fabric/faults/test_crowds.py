"""Many peers, floods and stalls: nobody overflows a queue, and nobody waits for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pdx.fabric import FabricOptions, Provider
from tests.fabric.batches import dense
from tests.fabric.pairs import Pair
from tests.fabric.sides import RemoteSide, Side, join

PAGE_BYTES = 4096
WINDOW = 16
#: What a link takes of a completion queue beside its window.
REST = 288


@pytest.fixture
def crowd(provider: Provider) -> Iterator[Callable[..., tuple[RemoteSide, list[Side]]]]:
    """``crowd(num_peers)``: a hub in a child whose queue is full with that many links, and peers
    here that are joined to it; link i of the hub is peer i's.
    """
    sides: list[Side | RemoteSide] = []

    def make(num_peers: int) -> tuple[RemoteSide, list[Side]]:
        num_bytes = num_peers * PAGE_BYTES
        hub_options = FabricOptions(
            queue_entries=num_peers * (WINDOW + REST), beat_timeout_s=30, connect_timeout_s=30
        )
        peer_options = FabricOptions(queue_entries=1024, beat_timeout_s=30, connect_timeout_s=30)
        hub = RemoteSide(provider, num_bytes, hub_options)
        peers = [Side(provider, num_bytes, peer_options) for _ in range(num_peers)]
        sides.extend([hub, *peers])
        return hub, peers

    yield make
    for side in sides:
        side.close()


def _serve_each_other(hub: RemoteSide, peers: list[Side]) -> None:
    hub.fill(1)
    links = [join(peer, hub, window=WINDOW) for peer in peers]
    for number, (peer, (here, there)) in enumerate(zip(peers, links, strict=True)):
        page = dense([number], [number], PAGE_BYTES, 1, 1)
        hub.call("expect", there, number + 1, 1, 1)
        peer.fabric.expect(here, 1, 1, 1)
        hub.call("write", hub.call("open_transfer", there, 1, 1), page)
        peer.wait("Arrived", link=here)
        peer.fabric.release(1, 1)  # an armed slot keeps its worker looking for more
        peer.fabric.write(peer.fabric.open_transfer(here, number + 1, 1), page)
    for number, peer in enumerate(peers):
        hub.wait("Arrived", slot=number + 1)
        offset = number * PAGE_BYTES
        assert peer.read(offset, PAGE_BYTES) == hub.read(offset, PAGE_BYTES)
        assert peer.num_set() == PAGE_BYTES
    assert hub.statistics().links_up == len(peers)


def test_twenty_peers_are_served(crowd: Callable[..., tuple[RemoteSide, list[Side]]]) -> None:
    _serve_each_other(*crowd(20))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_hundred_peers_are_served(
    crowd: Callable[..., tuple[RemoteSide, list[Side]]],
) -> None:
    _serve_each_other(*crowd(200))


def test_a_flood_onto_a_stopped_poller_stays_within_its_queue_and_all_arrives(
    crowd: Callable[..., tuple[RemoteSide, list[Side]]],
) -> None:
    num_pages = 20 * WINDOW
    hub, peers = crowd(10)
    links = [join(peer, hub, window=WINDOW) for peer in peers]
    for number, (_, there) in enumerate(links):
        hub.call("expect", there, number + 1, 1, num_pages)
    hub.stop()
    beats = [peer.statistics().beats_sent for peer in peers]
    for number, (peer, (here, _)) in enumerate(zip(peers, links, strict=True)):
        # Four pages to a write: five windows full.
        batch = dense([0] * num_pages, [number] * num_pages, PAGE_BYTES, 1, 1)
        peer.fabric.write(peer.fabric.open_transfer(here, number + 1, 1), batch)
    for peer, beat in zip(peers, beats, strict=True):
        peer.wait_statistic("beats_sent", beat + 2)  # its worker waits for nobody
        assert peer.statistics().writes_posted <= WINDOW
    hub.resume()
    for number in range(len(peers)):
        assert hub.wait("Arrived", slot=number + 1).atoms == num_pages
    assert hub.statistics().queue_errors == 0
    assert not any(peer.pending() for peer in peers)


def test_a_stopped_peer_does_not_hold_up_another(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(beat_timeout_s=30)
    stalled, quick = pair.there, pair.another(beat_timeout_s=30)
    to_stalled, at_stalled = join(pair.here, stalled, window=WINDOW)
    to_quick, at_quick = join(pair.here, quick, window=WINDOW)
    pages = list(range(0, 200, 2))
    stalled.call("expect", at_stalled, 1, 1, 10 * len(pages))
    stalled.stop()
    flood = pair.here.fabric.open_transfer(to_stalled, 1, 1)
    for _ in range(10):
        pair.here.fabric.write(flood, dense(pages, pages, PAGE_BYTES, 1, 256))
    for slot in range(1, 31):
        quick.call("expect", at_quick, slot, 1, len(pages))
        transfer = pair.here.fabric.open_transfer(to_quick, slot, 1)
        pair.here.fabric.write(transfer, dense(pages, pages, PAGE_BYTES, 1, 256))
        pair.here.fabric.seal(transfer)
        quick.wait("Arrived", slot=slot)
        pair.here.wait("TransferDone", transfer=transfer, code=0)
    stalled.resume()
    stalled.wait("Arrived", slot=1)
    assert not pair.here.pending()
