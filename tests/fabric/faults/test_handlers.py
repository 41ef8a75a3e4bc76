"""Everything may be called from inside the handler of an event."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from pdx.fabric import Arrived, Fenced, TransferDone
from tests.fabric.faults.echo import begin_request, request_pages, start_echo
from tests.fabric.pairs import Pair
from tests.fabric.sides import join

ROUNDS = 200


async def test_a_handler_may_write_arm_release_fence_and_close(
    make_pair: Callable[..., Pair],
) -> None:
    """The end of a transfer writes the first page, each arrival the next, the last arrival fences,
    the fence closes: all inside one handler.
    """
    pair = make_pair()
    here, there = join(pair.here, pair.there)
    fabric = pair.here.fabric
    batch = request_pages(4, 256)
    pair.there.run(start_echo, there, 1, ROUNDS, batch)
    seen: Counter[str] = Counter()
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask(generation: int) -> None:
        fabric.expect(here, 1, generation, batch.num_atoms)
        begin_request(fabric, here, 1, generation, batch)

    def handle() -> None:
        for event in fabric.events():
            seen[type(event).__name__] += 1
            match event:
                case TransferDone(slot=2):
                    ask(0)
                case Arrived(generation=generation):
                    fabric.release(1, generation)
                    if generation + 1 < ROUNDS:
                        ask(generation + 1)
                    else:
                        fabric.fence(here)
                case Fenced():
                    loop.remove_reader(fabric.fileno())
                    fabric.close()
                    closed.set()

    loop.add_reader(fabric.fileno(), handle)
    fabric.cancel(fabric.open_transfer(here, 2, 0))
    await asyncio.wait_for(closed.wait(), 30)
    assert seen == {"Arrived": ROUNDS, "TransferDone": ROUNDS + 1, "Fenced": 1}
