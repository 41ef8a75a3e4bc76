"""Pairs of sides: this process and a child, on every provider that runs here."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdx.fabric import FabricOptions, Provider, available_providers
from tests.fabric.sides import RemoteSide, Side

MIB = 1 << 20


@pytest.fixture(params=["tcp", "shm"])
def provider(request: pytest.FixtureRequest) -> Provider:
    assert request.param in available_providers()
    chosen: Provider = request.param
    return chosen


class Pair:
    """``here`` is a Side, ``there`` a RemoteSide; more can be made, and all are closed."""

    def __init__(self, provider: Provider, num_bytes: int, options: FabricOptions) -> None:
        self._made = (provider, num_bytes, options)
        self._all: list[Side | RemoteSide] = []
        self.here = Side(provider, num_bytes, options)
        self._all.append(self.here)
        self.there = self.another()

    def another(self) -> RemoteSide:
        """One more child."""
        side = RemoteSide(*self._made)
        self._all.append(side)
        return side

    def close(self) -> None:
        for side in self._all:
            side.close()
        closed = [s.pid for s in self._all if isinstance(s, RemoteSide) and not s.killed]
        for pid in [os.getpid(), *closed]:
            assert not shm_files(pid)


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


def shm_files(pid: int) -> list[str]:
    """Files of the process's endpoints."""
    return [path.name for path in Path("/dev/shm").glob(f"pdx-fabric-*-{pid}-*")]


@pytest.fixture
def seed() -> int:
    chosen = uuid.uuid4().int & 0xFFFFFFFF if "PDX_TEST_SEED" not in os.environ else 0
    chosen = int(os.environ.get("PDX_TEST_SEED", chosen))
    print(f"PDX_TEST_SEED={chosen}")
    return chosen
