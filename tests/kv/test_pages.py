"""The page pool: no page is ever lost, doubled, or free while somebody may still touch it."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from pdx.kv.pages import PagePool, PageState, Proof, Use

NUM_PAGES = 12


class PoolMachine(RuleBasedStateMachine):
    """Random owners, writers and readers against a model that knows who may touch which page."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        #: Pages of each lease that has not ended, by our own book-keeping.
        self.pages: dict[int, list[int]] = {}
        self.uses: dict[int, list[Use]] = {}
        self.given_up: set[int] = set()

    @rule(target=live, num_pages=st.integers(1, 5))
    def lease(self, num_pages: int) -> int:
        num_free = self.pool.num_free
        lease_id = self.pool.lease(num_pages)
        assert (lease_id is None) == (num_pages > num_free)
        if lease_id is None:
            assert self.pool.num_free == num_free
            return -1
        assert lease_id not in self.pages
        pages = list(self.pool.page_indices(lease_id))
        assert not set(pages) & self.taken()
        self.pages[lease_id], self.uses[lease_id] = pages, []
        return lease_id

    @rule(lease_id=live, num_pages=st.integers(1, 3))
    def extend(self, lease_id: int, num_pages: int) -> None:
        if lease_id not in self.pages or lease_id in self.given_up:
            return
        new = self.pool.extend(lease_id, num_pages)
        if new is not None:
            assert not set(new) & self.taken()
            self.pages[lease_id] += new

    @rule(lease_id=live, use=st.sampled_from(Use))
    def hold(self, lease_id: int, use: Use) -> None:
        if lease_id in self.pages and lease_id not in self.given_up:
            self.pool.hold(lease_id, use)
            self.uses[lease_id].append(use)

    @rule(lease_id=live, data=st.data())
    def drop(self, lease_id: int, data: st.DataObject) -> None:
        if not self.uses.get(lease_id):
            return
        use = data.draw(st.sampled_from(self.uses[lease_id]))
        proof = data.draw(st.sampled_from(Proof)) if use is Use.REMOTE_WRITE else None
        self.pool.drop(lease_id, use, proof)
        self.uses[lease_id].remove(use)
        self.end_if_over(lease_id)

    @rule(lease_id=live)
    def fail_a_send(self, lease_id: int) -> None:
        if Use.SEND in self.uses.get(lease_id, []):
            self.pool.exchange(lease_id, Use.SEND, Use.UNPROVED_SEND)
            self.uses[lease_id].remove(Use.SEND)
            self.uses[lease_id].append(Use.UNPROVED_SEND)

    @rule(lease_id=live)
    def retire(self, lease_id: int) -> None:
        if lease_id in self.pages and lease_id not in self.given_up:
            self.pool.retire(lease_id)
            self.given_up.add(lease_id)
            self.end_if_over(lease_id)

    def end_if_over(self, lease_id: int) -> None:
        if lease_id in self.given_up and not self.uses[lease_id]:
            del self.pages[lease_id], self.uses[lease_id]
            assert self.pool.state(lease_id) is PageState.FREE

    def taken(self) -> set[int]:
        return {page for pages in self.pages.values() for page in pages}

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        counts = self.pool.counts()
        assert counts.total == NUM_PAGES
        assert counts.free == NUM_PAGES - len(self.taken())
        assert len(self.taken()) == sum(map(len, self.pages.values()))

    @invariant()
    def nothing_in_use_is_free(self) -> None:
        for lease_id, uses in self.uses.items():
            state = self.pool.state(lease_id)
            if uses:
                assert state is not PageState.FREE
            if lease_id in self.given_up and set(uses) - {Use.SEND}:
                assert state is PageState.QUARANTINED


TestPoolMachine = PoolMachine.TestCase


def test_pages_stay_quarantined_until_the_remote_writer_is_proved_done() -> None:
    pool = PagePool(4)
    lease_id = pool.lease(3)
    assert lease_id is not None
    pool.hold(lease_id, Use.REMOTE_WRITE)
    pool.retire(lease_id)
    assert pool.counts().quarantined == 3
    assert pool.lease(2) is None
    pool.drop(lease_id, Use.REMOTE_WRITE, Proof.FENCED)
    assert pool.counts().at_rest


def test_a_remote_writer_cannot_end_without_a_proof() -> None:
    pool = PagePool(1)
    lease_id = pool.lease(1)
    assert lease_id is not None
    pool.hold(lease_id, Use.REMOTE_WRITE)
    with pytest.raises(AssertionError):
        pool.drop(lease_id, Use.REMOTE_WRITE)


def test_a_page_under_send_stays_filled_after_its_owner_is_done() -> None:
    pool = PagePool(2)
    lease_id = pool.lease(2)
    assert lease_id is not None
    pool.hold(lease_id, Use.SEND)
    pool.retire(lease_id)
    assert pool.counts().filled == 2
    pool.exchange(lease_id, Use.SEND, Use.UNPROVED_SEND)
    assert pool.counts().quarantined == 2
    pool.drop(lease_id, Use.UNPROVED_SEND)
    assert pool.counts().at_rest


def test_a_lease_that_ended_is_refused() -> None:
    pool = PagePool(2)
    lease_id = pool.lease(1)
    assert lease_id is not None
    pool.retire(lease_id)
    with pytest.raises(KeyError):
        pool.hold(lease_id, Use.PASS)
