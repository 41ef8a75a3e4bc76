"""Workers that sleep: on an eventfd, and until the network has something for them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

from tests.fabric.batches import dense
from tests.fabric.sides import join


def test_a_worker_asleep_on_an_eventfd_is_woken_by_it(make_pair: Callable[..., Any]) -> None:
    pair = make_pair()
    here, there = join(pair.here, pair.there)
    wakeup = os.eventfd(0)
    pair.here.fabric.add_wakeup(wakeup)
    pair.there.call("expect", there, 7, 1, 1)
    transfer = pair.here.fabric.open_transfer(here, 7, 1)
    pair.here.arm(transfer, dense([1], [1], 1024, 1, 64), first_value=1)
    sleeps = pair.here.statistics().sleeps
    pair.here.wait_statistic("sleeps", sleeps + 1)
    pair.here.progress(1)
    stored = time.monotonic_ns()
    os.eventfd_write(wakeup, 1)
    pair.here.fabric.seal(transfer)
    done = pair.here.wait("TransferDone")
    # Without the wake-up only the next beat would end the sleep, a quarter of a second later.
    assert done.last_progress_ns - stored < 100_000_000
    assert os.eventfd_read(wakeup) == 1, "several fabrics share an eventfd, so none drains it"
    pair.here.fabric.remove_wakeup(wakeup)
    os.close(wakeup)


def test_no_page_finds_a_worker_that_goes_on_sleeping(
    make_pair: Callable[..., Any], seed: int
) -> None:
    """Neither side ever spins, and beats are too rare to wake anybody. A page that comes while the
    worker goes to sleep, at any moment of it, must wake it: nothing else would.
    """
    pair = make_pair(spin_us=0, beat_interval_s=60, beat_timeout_s=200)
    here, there = join(pair.here, pair.there)
    page = dense([1], [1], 1024, 1, 64)
    chance = random.Random(seed)
    for generation in range(400):
        pair.there.call("expect", there, 1, generation, 1)
        pair.here.fabric.expect(here, 1, generation, 1)
        ours = pair.here.fabric.open_transfer(here, 1, generation)
        theirs = pair.there.call("open_transfer", there, 1, generation)
        _pass_time(chance.randrange(200_000))
        pair.here.fabric.write(ours, page)
        pair.here.fabric.seal(ours)
        pair.there.wait("Arrived", generation=generation)
        pair.there.call("write", theirs, page)
        pair.there.call("seal", theirs)
        pair.here.wait("Arrived", generation=generation)
        pair.here.wait("TransferDone", transfer=ours)
        pair.there.wait("TransferDone", transfer=theirs)
        pair.here.fabric.release(1, generation)
        pair.there.call("release", 1, generation)
    assert pair.here.statistics().sleeps > 400
    assert pair.here.statistics().beats_sent < 400


def _pass_time(duration_ns: int) -> None:
    """At work: a sleep would always end at the same moment of the worker's own."""
    until = time.monotonic_ns() + duration_ns
    while time.monotonic_ns() < until:
        pass
