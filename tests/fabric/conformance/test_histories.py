"""Random commands and faults on two simulated fabrics: see histories.py for what must hold."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdx.fabric import Provider
from tests.fabric.conformance.histories import COMMANDS, World

SEEDS = st.integers(0, 2**32 - 1)
PROVIDERS: st.SearchStrategy[Provider] = st.sampled_from(["tcp", "shm"])
SCRIPTS = st.lists(
    st.tuples(st.sampled_from(COMMANDS), st.integers(0, 999)), min_size=20, max_size=80
)


def test_many_long_histories_break_no_guarantee(seed: int) -> None:
    """More and longer than Hypothesis would; a failure is repeated with PDX_TEST_SEED."""
    rng = random.Random(seed)
    for _ in range(400):
        world = World(rng.getrandbits(32), rng.choice(["tcp", "shm"]))
        world.run([(rng.choice(COMMANDS), rng.randrange(1000)) for _ in range(150)])
        world.finish()


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, provider=PROVIDERS, commands=SCRIPTS)
def test_no_history_breaks_a_guarantee(
    seed: int, provider: Provider, commands: list[tuple[str, int]]
) -> None:
    world = World(seed, provider)
    world.run(commands)
    world.finish()


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, provider=PROVIDERS, commands=SCRIPTS)
def test_a_seed_has_one_history(
    seed: int, provider: Provider, commands: list[tuple[str, int]]
) -> None:
    worlds = [World(seed, provider) for _ in range(2)]
    for world in worlds:
        world.run(commands)
        world.finish()
    assert worlds[0].history == worlds[1].history
    assert worlds[0].receiver.read() == worlds[1].receiver.read()


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_long_histories_wrap_generations(provider: Provider, seed: int) -> None:
    """Without faults, every pair of the small immediates comes back several times."""
    world = World(seed, provider)
    script = ["start", "write", "arm", "seal", *["progress"] * 6, "long_advance"]
    script.append("release_arrived")
    for turn in range(40):
        world.run([(name, turn) for name in script])
    pairs = [job.pair for job in world.jobs]
    assert len(pairs) > 2 * len(set(pairs))
    assert all(job.arrived for job in world.jobs)
    world.finish()
