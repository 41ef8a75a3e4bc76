"""One suite for every fabric: what the interface promises, on real libfabric and in simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdx.fabric import FabricOptions, Provider, available_providers
from tests.fabric.conformance.simulated_pair import SimulatedPair
from tests.fabric.pairs import Pair

MIB = 1 << 20


@pytest.fixture(params=["tcp", "shm", "simulated-tcp", "simulated-shm"])
def system(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def provider(system: str) -> Provider:
    """Whose behaviour to expect."""
    if not system.startswith("simulated"):
        assert system in available_providers()
    return "tcp" if system.endswith("tcp") else "shm"


@pytest.fixture
def make_pair(system: str, provider: Provider, seed: int) -> Iterator[Callable[..., Any]]:
    """``make_pair(num_bytes, **options)``."""
    made: list[Pair | SimulatedPair] = []

    def make(num_bytes: int = MIB, **options: Any) -> Pair | SimulatedPair:
        if system.startswith("simulated"):
            made.append(SimulatedPair(seed, provider, num_bytes, FabricOptions(**options)))
        else:
            made.append(Pair(provider, num_bytes, FabricOptions(**options)))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture
def pair(make_pair: Callable[..., Any]) -> Any:
    return make_pair()
