"""One suite for every fabric: what the interface promises, on real libfabric and in simulation.

With several domains a side the whole of it is slow; test_domains.py has what matters most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdx.fabric import FabricOptions, Provider, available_providers
from tests.fabric.conformance.simulated_pair import SimulatedPair
from tests.fabric.pairs import Pair

MIB = 1 << 20


_SYSTEMS = ["tcp", "shm", "simulated-tcp", "simulated-shm"]
_GROUPS = [pytest.param(name, marks=pytest.mark.slow) for name in ("tcp-2x2", "simulated-tcp-2x2")]


@pytest.fixture(params=[*_SYSTEMS, *_GROUPS])
def system(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def provider(system: str) -> Provider:
    """Whose behaviour to expect."""
    chosen: Provider = "shm" if system.endswith("shm") else "tcp"
    assert system.startswith("simulated") or chosen in available_providers()
    return chosen


@pytest.fixture
def domains(system: str) -> tuple[int, int]:
    """How many the two sides have."""
    return (2, 2) if system.endswith("2x2") else (1, 1)


@pytest.fixture
def make_pair(
    system: str, provider: Provider, domains: tuple[int, int], seed: int
) -> Iterator[Callable[..., Any]]:
    """``make_pair(num_bytes, **options)``."""
    made: list[Pair | SimulatedPair] = []

    def make(num_bytes: int = MIB, **options: Any) -> Pair | SimulatedPair:
        how = (provider, num_bytes, FabricOptions(**options))
        if system.startswith("simulated"):
            made.append(SimulatedPair(seed, *how, domains=domains))
        else:
            made.append(Pair(*how, domains))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture
def pair(make_pair: Callable[..., Any]) -> Any:
    return make_pair()
