"""A worker that sleeps on an eventfd."""

from __future__ import annotations

import os
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
