"""Both state machines together over a fabric that reorders, delays, overtakes and loses: no page is
settled too early.
"""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import given, settings

from tests.messenger.protocol_world import World


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    may_fail=st.booleans(),
    may_lose=st.booleans(),
    end_early=st.booleans(),
)
def test_any_history_settles_everything_and_never_too_early(
    seed: int, may_fail: bool, may_lose: bool, end_early: bool
) -> None:
    world = World(random.Random(seed), may_fail, may_lose)
    for transfer_id in range(1, 13):
        world.start(transfer_id)
        for _ in range(world.rng.randint(0, 25)):
            world.turn()
        if world.rng.random() < 0.3:
            world.cancel()
    if end_early:
        world.end_link()
    for _ in range(6000):
        world.turn()
        if world.rng.random() < 0.05:
            world.tick()
    assert world.settled.keys() == world.pairs.keys()
    assert world.slots.num_taken == 0 and world.decode.num_open == 0
    assert not any(job.held for job in world.jobs.values()), "source pages are pinned for ever"
    for transfer_id in world.pairs:
        assert transfer_id in world.outcome or transfer_id in world.cancelled
    if not (may_fail or may_lose or end_early):
        assert not world.ended, "a healthy link was ended"
