"""What a simulated TCP connection does."""

from __future__ import annotations

import asyncio
import random

import pytest

from pdx.lab.sim.loop import Process, VirtualLoop
from pdx.lab.sim.wire import ControlNetwork, Transport


class Recorder(asyncio.Protocol):
    """What a transport tells its protocol."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.told.append("made")

    def connection_lost(self, exc: Exception | None) -> None:
        self.told.append("lost")


@pytest.mark.parametrize("reset_first", [False, True])
def test_a_reset_that_overtakes_the_connection_leaves_none(reset_first: bool) -> None:
    """Found by the simulator (seed 371): asyncio's streams are lost before they are made, which no
    real transport does.
    """
    loop = VirtualLoop(lambda process, what: pytest.fail(what))  # type: ignore[abstract]
    network = ControlNetwork(loop, random.Random(0), delay_ns=(1, 2))
    protocol = Recorder()
    end = Transport(network, Process("p0", "10.1.0.0"), protocol, ("10.1.0.0", 1), ("10.2.0.0", 2))
    steps = [end.make, lambda: end.lose(ConnectionResetError())]
    for step in reversed(steps) if reset_first else steps:
        step()
    assert protocol.told == ([] if reset_first else ["made", "lost"])
    assert end.is_over
    loop.dispose([])
