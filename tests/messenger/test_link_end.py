"""Which fault is counted for a link's end, whichever sign of it comes first."""

from __future__ import annotations

import asyncio
import errno

import pytest

from pdx.fabric import LinkDown
from pdx.messenger.actions import EndLink
from pdx.messenger.control import ControlConnection
from pdx.messenger.decode_side import DecodeSide
from pdx.messenger.link_end import LinkEnd, fault_of_link_down
from pdx.messenger.messages import Cancel, Goodbye, Posted, Sealed
from pdx.messenger.slots import SlotTable
from pdx.metrics.faults import Fault
from tests.messenger.protocol_world import started


def down(code: int) -> LinkDown:
    return LinkDown(link=1, code=code, reason="it broke")


def test_a_silent_data_path_is_not_a_broken_one() -> None:
    assert fault_of_link_down(down(errno.ETIMEDOUT), was_up=True) is Fault.NO_BEAT
    assert fault_of_link_down(down(errno.ECONNRESET), was_up=True) is Fault.DATA_PATH


@pytest.mark.parametrize("code", [errno.ETIMEDOUT, errno.ECONNREFUSED])
def test_a_data_path_that_never_came_up_is_another_fault(code: int) -> None:
    assert fault_of_link_down(down(code), was_up=False) is Fault.NO_DATA_PATH


class Wire:
    """A decoder's control connection, and what the test makes of its other end."""

    def __init__(self, ours: ControlConnection, theirs: ControlConnection) -> None:
        self.ours, self.theirs = ours, theirs


async def wire() -> Wire:
    ours: asyncio.Future[ControlConnection] = asyncio.get_running_loop().create_future()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours.set_result(ControlConnection(reader, writer))

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    theirs = ControlConnection(*await asyncio.open_connection(*server.sockets[0].getsockname()))
    server.close()
    return Wire(await ours, theirs)


async def ended(peer_says: Goodbye | None, *, peer_dies: bool) -> Fault | None:
    """The fault of a link whose data path failed."""
    both = await wire()
    end = LinkEnd("a write failed", Fault.DATA_PATH)
    end.tell(both.ours, no_data_path=False)
    if peer_says is not None:
        both.theirs.send(Cancel(transfer_id=1))  # what was under way says nothing
        both.theirs.send(peer_says)
    if peer_dies:
        both.theirs.drop("killed")
    await end.await_last_word(both.ours)
    await both.ours.close()
    await both.theirs.close()
    return end.fault


async def test_an_error_of_the_data_path_of_a_peer_that_is_gone_is_its_loss() -> None:
    assert await ended(None, peer_dies=True) is Fault.CONNECTION_LOST


async def test_an_error_of_the_data_path_is_final_when_the_peer_lives() -> None:
    told = Goodbye(reason="a write failed here too", fault=Fault.DATA_PATH)
    assert await ended(told, peer_dies=False) is Fault.DATA_PATH
    assert await ended(None, peer_dies=False) is Fault.DATA_PATH


@pytest.mark.parametrize("fault", [Fault.NO_BEAT, None])
async def test_the_peers_own_reason_counts_on_both_sides(fault: Fault | None) -> None:
    assert await ended(Goodbye(reason="it says why", fault=fault), peer_dies=False) is fault


async def test_a_peer_hears_the_fault_and_any_other_end_is_known_at_once() -> None:
    both = await wire()
    end = LinkEnd("no beat", Fault.NO_BEAT)
    end.tell(both.ours, no_data_path=False)
    await end.await_last_word(both.ours)
    end.on_link_down(Fault.DATA_PATH)
    assert end.fault is Fault.NO_BEAT
    heard = await both.theirs.receive()
    assert heard == Goodbye(reason="no beat", fault=Fault.NO_BEAT)
    await both.ours.close()
    await both.theirs.close()


def overdue(side: DecodeSide, pair: tuple[int, int], count: int) -> EndLink:
    """What a clock makes of a transfer to which nothing more happens."""
    for now in (100.0, 1000.0):
        actions = side.on_tick(now, {pair: count})
        if actions:
            [action] = actions
            assert isinstance(action, EndLink)
            return action
    pytest.fail("no clock ran")


@pytest.mark.parametrize(
    ("fault", "count"),
    [
        (Fault.LOST_WRITES, 5),
        (Fault.LOST_COMPLETION, 6),
        (Fault.STALLED_WRITES, 5),
        (Fault.CANCEL_UNANSWERED, 0),
        (Fault.NO_LAST_WORD, 6),
        (Fault.NO_SCORES, 6),
    ],
)
def test_each_clock_has_a_fault_of_its_own(fault: Fault, count: int) -> None:
    scored = fault is Fault.NO_SCORES
    side, message = started(SlotTable(), prompt_logprobs=1 if scored else None)
    pair = (message.slot, message.generation)
    match fault:
        case Fault.LOST_WRITES | Fault.LOST_COMPLETION:
            posted = Posted(transfer_id=1, atoms=6, prefill_start_ns=1, last_layer_ns=2)
            side.on_message(posted, 0.0)
        case Fault.STALLED_WRITES:
            side.on_message(Sealed(transfer_id=1), 0.0)
        case Fault.CANCEL_UNANSWERED:
            side.cancel(1, 0.0)
        case _:
            side.on_arrived(*pair)
    assert overdue(side, pair, count).fault is fault
