"""Pairs of sides: this process and a child, on every provider that runs here."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdx.fabric import FabricOptions, Provider, available_providers
from tests.fabric.pairs import Pair

MIB = 1 << 20


@pytest.fixture(params=["tcp", "shm"])
def provider(request: pytest.FixtureRequest) -> Provider:
    assert request.param in available_providers()
    chosen: Provider = request.param
    return chosen


@pytest.fixture
def make_pair(provider: Provider) -> Iterator[Callable[..., Pair]]:
    """``make_pair(num_bytes, **options)``."""
    made: list[Pair] = []

    def make(num_bytes: int = MIB, **options: Any) -> Pair:
        pair = Pair(provider, num_bytes, FabricOptions(**options))
        made.append(pair)
        return pair

    yield make
    for pair in made:
        pair.close()


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair()


@pytest.fixture
def seed() -> int:
    chosen = uuid.uuid4().int & 0xFFFFFFFF if "PDX_TEST_SEED" not in os.environ else 0
    chosen = int(os.environ.get("PDX_TEST_SEED", chosen))
    print(f"PDX_TEST_SEED={chosen}")
    return chosen
