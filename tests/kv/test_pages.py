"""The page pool: no page is ever lost, doubled, or free while somebody may still touch it."""

from __future__ import annotations

import random
from collections import OrderedDict

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
        self.next_key = 0
        #: Pages that were published, as long as they can be found, and their keys.
        self.published: dict[int, bytes] = {}
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
        self.forget_evicted()
        self.pages[lease_id], self.uses[lease_id] = pages, []
        return lease_id

    @rule(target=live, num_pages=st.integers(0, 3), data=st.data())
    def lease_with_shared_pages(self, num_pages: int, data: st.DataObject) -> int:
        self.forget_evicted()
        shared = data.draw(
            st.lists(st.sampled_from(sorted(self.published)), unique=True, max_size=3)
            if self.published
            else st.just([])
        )
        lease_id = self.pool.lease(num_pages, shared)
        if lease_id is None:
            return -1
        pages = list(self.pool.page_indices(lease_id))
        assert pages[: len(shared)] == shared
        assert not set(pages[len(shared) :]) & (self.taken() | set(shared))
        self.forget_evicted()
        self.pages[lease_id], self.uses[lease_id] = pages, []
        return lease_id

    @rule(lease_id=live, data=st.data())
    def publish(self, lease_id: int, data: st.DataObject) -> None:
        pages = self.pages.get(lease_id, [])
        if not pages or lease_id in self.given_up:
            return
        self.forget_evicted()
        place = data.draw(st.integers(0, len(pages) - 1))
        key = self.next_key.to_bytes(4, "little")
        self.next_key += 1
        self.pool.publish(lease_id, place, [key])
        if pages[place] in self.published:
            assert not self.pool.find([key]), "a page has one content"
        else:
            assert self.pool.find([key]) == [pages[place]]
            self.published[pages[place]] = key

    @rule(lease_id=live, data=st.data())
    def publish_several(self, lease_id: int, data: st.DataObject) -> None:
        """Some of them, or of their contents, are known already."""
        pages = self.pages.get(lease_id, [])
        if not pages or lease_id in self.given_up:
            return
        self.forget_evicted()
        place = data.draw(st.integers(0, len(pages) - 1))
        keys = []
        for page in pages[place:]:
            unused = sorted(set(self.published.values()) - set(keys))
            if unused and data.draw(st.booleans()):
                keys.append(data.draw(st.sampled_from(unused)))
            else:
                keys.append(self.next_key.to_bytes(4, "little"))
                self.next_key += 1
                if page not in self.published:
                    self.published[page] = keys[-1]
        self.pool.publish(lease_id, place, keys)
        for page, key in self.published.items():
            assert self.pool.find([key]) == [page]

    def forget_evicted(self) -> None:
        for page, key in list(self.published.items()):
            if not self.pool.find([key]):
                assert page not in self.taken(), "a page that a lease has was given away"
                del self.published[page]

    @rule(lease_id=live, num_pages=st.integers(1, 3))
    def extend(self, lease_id: int, num_pages: int) -> None:
        if lease_id not in self.pages or lease_id in self.given_up:
            return
        new = self.pool.extend(lease_id, num_pages)
        if new is not None:
            assert not set(new) & self.taken()
            self.forget_evicted()
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
        assert counts.free + counts.cached == NUM_PAGES - len(self.taken())
        self.forget_evicted()
        assert counts.cached == len(set(self.published) - self.taken())
        owned = [p for pages in self.pages.values() for p in pages if p not in self.published]
        assert len(set(owned)) == len(owned), "a page of two leases that was never published"

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


def test_of_many_cached_pages_the_least_recently_used_gives_way_first() -> None:
    """More of them than are looked up at once, shared and given up again meanwhile."""
    num_pages, dice = 3000, random.Random(1)
    pool = PagePool(num_pages)
    keys = [i.to_bytes(4, "little") for i in range(num_pages)]
    leases = [pool.lease(1) for _ in range(num_pages)]
    for lease_id, key in zip(leases, keys, strict=True):
        assert lease_id is not None
        pool.publish(lease_id, 0, [key])
    order: OrderedDict[bytes, None] = OrderedDict()  # the next to give way comes first
    for i in dice.sample(range(num_pages), num_pages):
        lease_id = leases[i]
        assert lease_id is not None
        pool.retire(lease_id)
        order[keys[i]] = None
    while order:
        if dice.random() < 0.5:
            key = dice.choice(list(order))
            shared = pool.lease(0, pool.find([key]))
            assert shared is not None
            pool.retire(shared)
            order.move_to_end(key)
        wanted = min(len(order), dice.choice([1, 1, 7, 400]))
        assert pool.lease(wanted) is not None
        gone = [order.popitem(last=False)[0] for _ in range(wanted)]
        assert not any(pool.find([key]) for key in gone)
        assert all(pool.find([key]) for key in list(order)[:3])
    assert pool.num_free == 0


def test_nothing_gives_way_to_a_lease_that_the_free_pages_hold() -> None:
    pool = PagePool(4)
    assert pool.evict_some(4, most=1)
    assert pool.num_free == 4


def test_the_pages_of_a_lease_from_a_place_on_are_those_that_came_since() -> None:
    pool = PagePool(8)
    lease_id = pool.lease(3)
    assert lease_id is not None
    assert pool.num_pages_of(lease_id) == 3
    new = pool.extend(lease_id, 2)
    assert new is not None and pool.page_indices(lease_id, 3) == tuple(new)
    assert pool.num_pages_of(lease_id) == 5
