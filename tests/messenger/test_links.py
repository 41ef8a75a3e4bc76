"""The life and the end of a link, both sides of it over real sockets and a simulated data path."""

from __future__ import annotations

import pytest

from pdx.kv.pages import Proof
from pdx.messenger.messages import (
    Cancel,
    Posted,
)
from pdx.metrics.faults import Fault
from tests.messenger.protocol_world import chunk
from tests.messenger.two_nodes import (
    Pair,
    both,
)


async def test_what_a_peer_may_not_send_ends_the_link_at_both() -> None:
    async with both() as nodes:
        nodes.of_prefiller.send(Cancel(transfer_id=1))
        await nodes.decode.over.wait()
        assert nodes.decode.end_reason == "a prefiller may not send Cancel"
        await nodes.prefill.over.wait()
        assert [nodes.decode.fault] == nodes.prefiller.faults == [Fault.PROTOCOL]
    async with both() as nodes:
        nodes.of_decoder.send(Posted(transfer_id=1, atoms=1, prefill_start_ns=0, last_layer_ns=0))
        await nodes.prefill.over.wait()
        await nodes.decode.over.wait()
        assert [nodes.decode.fault] == nodes.prefiller.faults == [Fault.PROTOCOL]


async def test_a_goodbye_ends_the_link_with_its_reason() -> None:
    async with both() as nodes:
        nodes.ask(1)
        nodes.decode.end("it stops", None)
        nodes.decode.end("it stops again", None)
        await nodes.decode.over.wait()
        assert nodes.decode.end_reason == "it stops"
        await nodes.prefill.over.wait()
        assert nodes.decode.fault is None and not nodes.prefiller.faults
        assert nodes.decoder.settled == [(1, Proof.FENCED)]
        assert "it stops" in nodes.decoder.lost[0].message
        assert nodes.decode.atoms_landed(1) == 0
        await nodes.prefill.over.wait()


async def test_a_draining_prefillers_link_ends_when_nothing_is_open() -> None:
    async with both() as nodes:
        nodes.ask(1)
        nodes.prefill.send_draining()
        nodes.decode.cancel(1)
        await nodes.decode.over.wait()
        assert nodes.decode.end_reason == "the prefiller drains"
        assert nodes.decoder.settled == [(1, Proof.DRAINED)]
        assert nodes.prefiller.accepted == nodes.prefiller.dropped == [1]


async def test_what_an_engine_does_not_take_is_rejected_with_its_reason() -> None:
    async with both(takes=False) as nodes:
        nodes.ask(1)
        await nodes.decoder.was_settled.wait()
        assert nodes.decoder.settled == [(1, Proof.NOT_STARTED)]
        [error] = nodes.decoder.lost
        assert (error.message, error.http_status) == ("no room", 503)
        assert nodes.decode.num_open == nodes.prefill.num_open == 0


async def test_a_peer_that_reads_nothing_for_too_long_loses_its_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with both() as nodes:
        monkeypatch.setattr("pdx.messenger.control._MAX_UNSENT_BYTES", -1)
        nodes.ask(1)
        await nodes.decode.over.wait()
        assert "does not read its control messages" in str(nodes.decode.end_reason)
        assert nodes.decode.fault is Fault.CONTROL_UNREAD
        assert nodes.decoder.settled == [(1, Proof.FENCED)]


def fence_behind_its_back(nodes: Pair) -> None:
    link = nodes.prefill._fabric_link
    assert link is not None
    link.fabric.fence(link.link)


def arm(nodes: Pair, *, start: int, end: int, last: bool) -> None:
    nodes.prefill.on_chunk(1, chunk(start, end, last=last, pages=(0, 1)))


async def asked(nodes: Pair) -> None:
    """The prefiller has a prompt of 20 tokens."""
    nodes.ask(1)
    await nodes.prefiller.was_asked.wait()


async def test_a_link_that_is_down_when_a_prompt_begins_fails_the_transfer_and_ends() -> None:
    async with both() as nodes:
        await asked(nodes)
        fence_behind_its_back(nodes)
        arm(nodes, start=0, end=20, last=True)
        await nodes.decode.over.wait()
        assert nodes.decoder.settled == [(1, Proof.FENCED)]
        assert "the prefiller was lost" in nodes.decoder.lost[0].message
        await nodes.prefill.over.wait()
        # The link's fault is the transfer's: it is not counted once more.
        assert nodes.decoder.faults == []
        assert nodes.prefiller.dropped == [1]
        assert nodes.prefiller.released == [1]


async def test_a_link_that_goes_down_between_two_chunks_fails_the_transfer() -> None:
    async with both() as nodes:
        await asked(nodes)
        arm(nodes, start=0, end=16, last=False)
        [view] = nodes.prefill.views()
        assert (view.state, view.num_armed, view.num_tokens) == ("open", 16, 20)
        fence_behind_its_back(nodes)
        arm(nodes, start=16, end=20, last=True)
        await nodes.decode.over.wait()
        assert nodes.decoder.settled == [(1, Proof.DRAINED)], "nothing was posted"
        assert "0 of 4 posted" in nodes.decoder.lost[0].message
        await nodes.prefill.over.wait()
        assert nodes.prefiller.released == [1]


async def test_a_client_that_leaves_frees_the_source_and_then_the_target() -> None:
    """Nothing is posted: the armed writes wait for a pass that never runs."""
    async with both() as nodes:
        await asked(nodes)
        arm(nodes, start=0, end=16, last=False)
        assert nodes.decode.atoms_landed(1) == 0
        nodes.decode.cancel(1)
        await nodes.decoder.was_settled.wait()
        assert nodes.decoder.settled == [(1, Proof.DRAINED)]
        assert nodes.prefiller.released == nodes.prefiller.dropped == [1]
        arm(nodes, start=16, end=20, last=True)
        assert nodes.decode.usable and nodes.prefill.num_open == 0


async def test_a_prefiller_whose_decoder_reads_nothing_ends_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with both() as nodes:
        await asked(nodes)
        nodes.decode.cancel(1)
        monkeypatch.setattr("pdx.messenger.control._MAX_UNSENT_BYTES", -1)
        await nodes.prefill.over.wait()
        await nodes.decode.over.wait()
        assert nodes.prefiller.faults == [Fault.CONTROL_UNREAD]
        assert nodes.decode.fault is Fault.CONNECTION_LOST, "it could not be told"
