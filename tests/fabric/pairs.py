"""Pairs of native sides: this process and a child."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from pdx.fabric import FabricOptions, Provider
from tests.fabric.sides import RemoteSide, Side

__all__ = ["Pair"]


class Pair:
    """``here`` is a Side, ``there`` a RemoteSide; more can be made, and all are closed.

    ``domains`` are those of ``here`` and of all others; over tcp each has an address of its own.
    """

    def __init__(
        self,
        provider: Provider,
        num_bytes: int,
        options: FabricOptions,
        domains: tuple[int, int] = (1, 1),
    ) -> None:
        self._made = (provider, num_bytes)
        self._options = options
        self._there_hosts = _hosts(domains[1])
        self._all: list[Side | RemoteSide] = []
        self.here = Side(provider, num_bytes, options, _hosts(domains[0]))
        self._all.append(self.here)
        self.there = self.another()

    def another(self, **options: Any) -> RemoteSide:
        """One more child, with these options or the pair's."""
        chosen = FabricOptions(**options) if options else self._options
        side = RemoteSide(*self._made, chosen, self._there_hosts)
        self._all.append(side)
        return side

    def now_ns(self) -> int:
        """The clock of the events' times."""
        return time.monotonic_ns()

    def close(self) -> None:
        for side in self._all:
            side.close()
        closed = [s.pid for s in self._all if isinstance(s, RemoteSide) and not s.killed]
        for pid in [os.getpid(), *closed]:
            assert not shm_files(pid)


def _hosts(num_domains: int) -> list[str]:
    return [f"127.0.0.{i}" for i in range(1, num_domains + 1)]


def shm_files(pid: int) -> list[str]:
    """Files of the process's endpoints."""
    return [path.name for path in Path("/dev/shm").glob(f"pdx-fabric-*-{pid}-*")]
