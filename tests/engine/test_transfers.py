"""A decoder's transfers: whatever order a link's words come in, each is settled once and decided
once, its pages are held until it is settled, and it ends exactly when both have happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pdx.config.node import RecoveryConfig
from pdx.engine.decode_request import DecodeRequest
from pdx.engine.prefillers import Prefiller, Prefillers
from pdx.engine.transfers import Transfer, TransferTable
from pdx.errors import InvalidRequest, TransferFailed
from pdx.kv.pages import PagePool, PageState, Proof
from pdx.messenger.actions import PrefillTimes
from pdx.messenger.decode_link import Arrival

NUM_PAGES = 64


@pytest.fixture(autouse=True)
def running_loop() -> Iterator[None]:
    """The clock is the running event loop's, and nothing here waits."""
    loop = asyncio.new_event_loop()
    asyncio._set_running_loop(loop)
    yield
    asyncio._set_running_loop(None)
    loop.close()


@dataclass(eq=False)
class Link:
    """What a transfer reads of its link."""

    peer: str = "prefiller:7000"
    provider: str = "tcp"
    peer_node: str = "a"
    same_host: bool = True
    usable: bool = True
    max_prompt_len: int = 1000
    landed: int = 0

    def atoms_landed(self, transfer_id: int) -> int:
        return self.landed


def prefiller_with(link: Link) -> Prefiller:
    connector = SimpleNamespace(link=link, address="prefiller:7000", status="", faults={})
    prefiller = Prefiller(cast(Any, connector), RecoveryConfig())
    prefiller.on_link(cast(Any, link))
    return prefiller


def arrival() -> Arrival:
    return Arrival(ns=np.array([1], np.int64), atoms=np.array([4], np.uint32))


class TransferMachine(RuleBasedStateMachine):
    """Transfers of two prefillers, one of which gets a new link now and then."""

    moving = Bundle("moving")
    settled = Bundle("settled")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.table = TransferTable(self.pool)
        self.prefillers = [prefiller_with(Link()), prefiller_with(Link())]
        #: Transfers that are neither settled nor decided, or only one of the two.
        self.unsettled: set[Transfer] = set()
        self.undecided: dict[Transfer, DecodeRequest] = {}
        self.next_request = 0

    @rule(target=moving, which=st.integers(0, 1), num_tokens=st.integers(1, 40))
    def ask(self, which: int, num_tokens: int) -> Transfer | None:
        lease_id = self.pool.lease(1)
        if lease_id is None:
            return None
        self.next_request += 1
        request = DecodeRequest(request_id=self.next_request, prompt_len=num_tokens + 1)
        prefiller = self.prefillers[which]
        assert prefiller.link is not None
        transfer = self.table.start(
            request,
            prefiller,
            prefiller.link,
            lease_id=lease_id,
            num_tokens=num_tokens,
            num_asked=num_tokens,
            num_bytes=num_tokens * 8,
        )
        self.unsettled.add(transfer)
        self.undecided[transfer] = request
        assert request.transfer is transfer
        return transfer

    @rule(which=st.integers(0, 1), same_node=st.booleans())
    def link_again(self, which: int, same_node: bool) -> None:
        connector = cast(Any, self.prefillers[which].connector)
        connector.link = Link(peer_node=connector.link.peer_node if same_node else "another")
        self.prefillers[which].on_link(connector.link)

    @rule(target=settled, transfer=consumes(moving), proof=st.sampled_from(Proof))
    def settle(self, transfer: Transfer | None, proof: Proof) -> Transfer | None:
        if transfer is None:
            return None
        assert self.pool.state(transfer.lease_id) is PageState.IN_FLIGHT
        self.table.settle(transfer.transfer_id, proof)
        self.unsettled.discard(transfer)
        with pytest.raises((AssertionError, KeyError)):
            self.table.settle(transfer.transfer_id, proof)
        return transfer

    @rule(transfer=st.one_of(moving, settled), data=st.data())
    def decide(self, transfer: Transfer | None, data: st.DataObject) -> None:
        if transfer is None or transfer not in self.undecided:
            return
        request = self.undecided.pop(transfer)
        error = TransferFailed("it broke")
        match data.draw(st.sampled_from(["ready", "lost", "refused", "cancelled"])):
            case "ready":
                self.table.arrive(transfer.transfer_id, arrival())
                assert self.table.ready(transfer.transfer_id) is request
                assert request.transfer is transfer
            case "lost":
                found = self.table.lose(transfer.transfer_id, error, is_its_own_fault=False)
                assert found is request
                assert request.transfer is None
                assert request.failed_prefillers == [transfer.prefiller]
            case "refused":
                own = InvalidRequest("too long")
                self.table.lose(transfer.transfer_id, own, is_its_own_fault=True)
                assert request.last_error is own
            case "cancelled":
                self.table.cancel(transfer)
        assert transfer.end_s is not None or transfer in self.unsettled

    @rule(transfer=st.one_of(moving, settled))
    def tell_times(self, transfer: Transfer | None) -> None:
        if transfer is not None and (known := self.table.get(transfer.transfer_id)) is not None:
            assert known is transfer
            known.times = PrefillTimes(transfer.transfer_id, 1, 2)

    @invariant()
    def all_that_has_not_ended_is_known_and_nothing_else_holds_pages(self) -> None:
        views = self.table.views()
        alive = self.unsettled | set(self.undecided)
        assert {view.transfer_id for view in views.live} == {each.transfer_id for each in alive}
        assert self.table.num_unsettled == len(self.unsettled)
        in_flight = self.pool.counts().in_flight
        assert in_flight == len(self.unsettled)

    @invariant()
    def a_prefiller_has_to_do_what_was_asked_over_its_link(self) -> None:
        for prefiller in self.prefillers:
            queued = sum(
                each.num_asked for each in self.unsettled if each.link is prefiller.connector.link
            )
            assert prefiller.queued_tokens == queued


TestTransferMachine = TransferMachine.TestCase


def started(link: Link) -> tuple[TransferTable, Transfer, DecodeRequest]:
    pool = PagePool(NUM_PAGES)
    table = TransferTable(pool)
    lease_id = pool.lease(1)
    assert lease_id is not None
    request = DecodeRequest(request_id=1, prompt_len=9)
    transfer = table.start(
        request,
        prefiller_with(link),
        cast(Any, link),
        lease_id=lease_id,
        num_tokens=8,
        num_asked=8,
        num_bytes=64,
    )
    transfer.atoms = 4
    return table, transfer, request


def test_a_refusal_is_shown_with_its_reason_though_it_is_settled_first() -> None:
    table, transfer, _ = started(Link())
    table.settle(transfer.transfer_id, Proof.NOT_STARTED)
    table.lose(transfer.transfer_id, InvalidRequest("no room"), is_its_own_fault=True)
    [view] = table.views().recent
    assert (view.state, view.reason, view.is_settled) == ("refused", "no room", True)
    assert table.views().live == []


def test_atoms_are_counted_by_the_link_until_the_transfer_is_settled() -> None:
    table, transfer, _ = started(link := Link(landed=3))
    assert table.views().live[0].atoms_landed == 3
    table.settle(transfer.transfer_id, Proof.COUNTED)
    link.landed = 0  # the slot is another's
    assert table.views().live[0].atoms_landed == 4


def test_the_prefillers_last_word_still_comes_after_the_end() -> None:
    table, transfer, request = started(Link())
    table.settle(transfer.transfer_id, Proof.COUNTED)
    table.arrive(transfer.transfer_id, arrival())
    table.ready(transfer.transfer_id)
    known = table.get(transfer.transfer_id)
    assert known is transfer
    known.times = PrefillTimes(transfer.transfer_id, 1, 5, 6)
    assert request.timeline().hidden_share == 1.0


def test_only_the_last_hundred_ended_ones_are_kept() -> None:
    pool = PagePool(1)
    table, prefiller = TransferTable(pool), prefiller_with(link := Link())
    for number in range(150):
        lease_id = pool.lease(1)
        assert lease_id is not None
        request = DecodeRequest(request_id=number, prompt_len=2)
        transfer = table.start(
            request,
            prefiller,
            cast(Any, link),
            lease_id=lease_id,
            num_tokens=1,
            num_asked=1,
            num_bytes=8,
        )
        table.cancel(transfer)
        table.settle(transfer.transfer_id, Proof.DRAINED)
        pool.retire(lease_id)
    views = table.views()
    assert [view.transfer_id for view in views.recent] == list(range(51, 151))
    assert {view.state for view in views.recent} == {"cancelled"}


def test_a_refused_probe_leaves_the_prefiller_to_another_one() -> None:
    """The breaker lets one request through at a time while it is open. One that no prefiller would
    take must not be the last.
    """
    table, transfer, _ = started(Link())
    breaker = transfer.prefiller.breaker
    for _ in range(5):
        breaker.on_failure(0.0)
    breaker.on_asked()
    assert not breaker.allows(1e9)
    table.settle(transfer.transfer_id, Proof.NOT_STARTED)
    table.lose(transfer.transfer_id, InvalidRequest("too long"), is_its_own_fault=True)
    assert breaker.allows(1e9)


def test_the_prefiller_with_the_fewest_tokens_to_do_comes_first_and_equals_take_turns() -> None:
    one, other = prefiller_with(Link()), prefiller_with(Link())
    both = Prefillers([one, other])

    def first() -> Prefiller:
        return both.candidates(10)[0].prefiller

    assert first() is one
    one.on_asked(1, 10)
    assert first() is other
    other.on_asked(2, 30)
    assert first() is one
    link = one.connector.link
    assert link is not None
    one.on_settled(link, 10)
    other.on_link(cast(Any, Link()))
    assert one.queued_tokens == other.queued_tokens == 0
    assert first() is one, "the other was asked last"


def test_a_prompt_that_is_too_long_or_a_link_that_drains_makes_a_prefiller_unable() -> None:
    link = Link(max_prompt_len=9)
    both = Prefillers([prefiller_with(link)])
    assert both.candidates(9)[0].able
    assert not both.candidates(10)[0].able
    assert both.max_prompt_len == 9
    link.usable = False
    assert not both.candidates(9)[0].able
    assert both.max_prompt_len is None
    assert not both.any_trusted
