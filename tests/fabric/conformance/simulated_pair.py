"""Sides and pairs in a simulated room, with the faces of the native ones. Waiting moves time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pdx.fabric import FabricEvent, FabricOptions, MemoryPart, PageBatch, Provider
from pdx.lab.simulated_fabric import Conditions, SimulatedFabric, SimulatedNetwork
from tests.fabric.conformance.virtual_clock import VirtualClock

__all__ = ["SimulatedPair", "SimulatedSide"]

_WAIT_S = 10.0


class SimulatedSide:
    """Side and RemoteSide at once: a node of its own in the room."""

    def __init__(
        self,
        network: SimulatedNetwork,
        clock: VirtualClock,
        name: str,
        provider: Provider,
        num_bytes: int,
        options: FabricOptions | None = None,
        num_domains: int = 1,
    ) -> None:
        self.name = name
        self.killed = False
        self.memory = np.zeros(num_bytes, np.uint8)
        self.fabric = SimulatedFabric(
            network, name, provider=provider, num_domains=num_domains, options=options
        )
        self.address = network.memory.map(self.memory)
        self.word_address = network.memory.map(bytearray(8))
        self.region = self.fabric.register(self.address, num_bytes)
        self._network = network
        self._clock = clock
        self._seen: list[FabricEvent] = []

    def register_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        self.region = self.fabric.register_parts(
            [MemoryPart(address=self.address + start, num_bytes=length) for start, length in spans]
        )

    def open_link(self, **arguments: Any) -> tuple[int, bytes]:
        link = self.fabric.open_link(self.region, **arguments)
        return link, self.fabric.descriptor(link)

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self.fabric, name)(*arguments, **named)

    def arm(self, transfer: int, batch: PageBatch, first_value: int) -> None:
        self.fabric.arm(transfer, batch, word_address=self.word_address, first_value=first_value)

    def progress(self, value: int) -> None:
        self._network.memory.store_word(self.word_address, value)

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.memory[:] = rng.integers(1, 255, len(self.memory), dtype=np.uint8)

    def zero(self) -> None:
        self.memory[:] = 0

    def read(self, offset: int = 0, num_bytes: int | None = None) -> bytes:
        end = len(self.memory) if num_bytes is None else offset + num_bytes
        return self.memory[offset:end].tobytes()

    def num_set(self) -> int:
        return int(np.count_nonzero(self.memory))

    def wait(self, kind: str, *, timeout_s: float = _WAIT_S, **fields: Any) -> Any:
        found: list[FabricEvent] = []

        def take() -> bool:
            self._seen += self.fabric.events()
            for event in self._seen:
                if type(event).__name__ == kind and all(
                    getattr(event, name) == value for name, value in fields.items()
                ):
                    self._seen.remove(event)
                    found.append(event)
                    return True
            return False

        if not self._clock.run_until(take, round(timeout_s * 1e9)):
            state = f"seen {self._seen}, {self.fabric.statistics()}"
            raise TimeoutError(f"no {kind} {fields} in {timeout_s} s; {state}")
        return found[0]

    def wait_set(self, offset: int) -> None:
        self._wait_for(lambda: self.memory[offset] != 0)

    def wait_count(self, slot: int, generation: int, atoms: int) -> None:
        self._wait_for(lambda: self.fabric.count(slot, generation) >= atoms)

    def wait_statistic(self, name: str, at_least: int) -> int:
        self._wait_for(lambda: getattr(self.fabric.statistics(), name) >= at_least)
        return int(getattr(self.fabric.statistics(), name))

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        if not self._clock.run_until(condition, round(_WAIT_S * 1e9)):
            raise TimeoutError(f"{self.fabric.statistics()}")

    def pending(self) -> list[FabricEvent]:
        self._seen += self.fabric.events()
        return list(self._seen)

    def statistics(self) -> Any:
        return self.fabric.statistics()

    def domain_statistics(self) -> Any:
        return self.fabric.domain_statistics()

    def kill(self) -> None:
        self.killed = True
        self._network.kill(self.name)

    def stop(self) -> None:
        self._network.pause(self.name)

    def resume(self) -> None:
        self._network.resume(self.name)

    def close(self) -> None:
        self.fabric.close()


class SimulatedPair:
    """Pair in a room of its own."""

    def __init__(
        self,
        seed: int,
        provider: Provider,
        num_bytes: int,
        options: FabricOptions,
        conditions: Conditions | None = None,
        domains: tuple[int, int] = (1, 1),
        **room: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.network = SimulatedNetwork(
            random.Random(seed), self.clock, conditions=conditions, **room
        )
        self._made = (provider, num_bytes)
        self._options = options
        self._domains = domains
        self._all: list[SimulatedSide] = []
        self.here = self.another()
        self.there = self.another()

    def another(self, **options: Any) -> SimulatedSide:
        chosen = FabricOptions(**options) if options else self._options
        name = f"node-{len(self._all)}"
        num_domains = self._domains[min(len(self._all), 1)]
        side = SimulatedSide(self.network, self.clock, name, *self._made, chosen, num_domains)
        self._all.append(side)
        return side

    def now_ns(self) -> int:
        return self.clock.now_ns()

    def close(self) -> None:
        for side in self._all:
            side.close()
