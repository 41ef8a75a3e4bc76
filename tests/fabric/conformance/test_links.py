"""Links: what is refused, what the limits are, how connecting ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pdx.errors import FabricError
from tests.fabric.batches import dense
from tests.fabric.sides import join


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


def test_a_transfer_on_a_lost_link_fails(pair: Any) -> None:
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
