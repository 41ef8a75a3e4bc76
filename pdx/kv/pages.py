"""The page pool of one node: which page belongs to whom, who still touches it, and when it is free
again.

Owned by the primary's event loop. Knows no tensor, no clock and no network.

The rule (docs/architecture.md, "Page lifetime"): **a page is free only when nobody can touch it any
more.** Whoever may touch the pages of a lease holds a *use* on it: a peer's writes on their way in,
a forward pass, our own posted writes that read them. Giving up a lease (:meth:`PagePool.retire`)
frees its pages at once if nothing holds it; otherwise they are quarantined (or stay filled, while
only our own writes read them) and freed by whoever ends the last use. A remote writer's use can
only be ended with a :class:`Proof`, and none of the proofs is a timer.

    free --lease--> leased --hold REMOTE_WRITE--> in flight --drop(proof)--> filled --retire--> free
                      |                              |
                      +----------- retire -----------+-----> quarantined --last use ends--> free

A page whose content is final can be *published* under a key: then later leases may share it, and it
is only read from then on. A published page is filled while any lease has it; after the last one it
is cached, until it is shared again or, least recently used first, its place is needed.
"""

from __future__ import annotations

import enum
import itertools
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdx.checkpoint.layers import FULL_ATTENTION

__all__ = ["PageCounts", "PagePool", "PageState", "Proof", "Use"]

#: Keys that are looked up before one that is not there is noticed.
_KEYS_A_LOOK = 256
#: Pages to give way that are looked up at once, at least.
_MIN_VICTIMS = 1024


class PageState(enum.Enum):
    """What a page is now. Every page is in exactly one state."""

    FREE = "free"
    LEASED = "leased"
    IN_FLIGHT = "in_flight"
    FILLED = "filled"
    QUARANTINED = "quarantined"
    CACHED = "cached"


class Use(enum.Enum):
    """Somebody who may still touch a lease's pages."""

    #: Each is there once; Enum's own hash, of the name, is a call in Python.
    __hash__ = object.__hash__

    #: A peer's one-sided writes, from when it is asked until they are proved to be over.
    REMOTE_WRITE = "remote_write"
    #: A forward pass of a rank of this node.
    PASS = "pass"
    #: Our own posted (or armed) writes that read the pages.
    SEND = "send"
    #: Our writes that failed: over shm the peer may still pull from the pages until the fence.
    UNPROVED_SEND = "unproved_send"


class Proof(enum.Enum):
    """Why a remote writer can no longer touch our pages. A timer is not among them."""

    #: Every atom that was expected has been counted.
    COUNTED = "counted"
    #: The peer drained, none of its writes failed, and as many atoms as it posted have been
    #: counted.
    DRAINED = "drained"
    #: The link's endpoint is closed.
    FENCED = "fenced"
    #: The peer was never asked, or refused before it posted anything.
    NOT_STARTED = "not_started"


class PageCounts(NamedTuple):
    """Pages by state. They always add up to ``total``."""

    free: int
    leased: int
    in_flight: int
    filled: int
    quarantined: int
    cached: int

    @property
    def total(self) -> int:
        busy = self.leased + self.in_flight + self.filled + self.quarantined
        return self.free + busy + self.cached

    @property
    def at_rest(self) -> bool:
        """True when nothing is leased, in flight, filled or quarantined."""
        return self.free + self.cached == self.total


_NO_USES = dict.fromkeys(Use, 0)


@dataclass(slots=True)
class _Lease:
    page_indices: list[int]
    #: How many of the pages are published.
    num_published: int = 0
    uses: dict[Use, int] = field(default_factory=_NO_USES.copy)
    #: All of them together.
    num_uses: int = 0
    filled: bool = False
    retired: bool = False

    @property
    def state(self) -> PageState:
        if self.retired:
            only_sent = self.uses[Use.SEND] == self.num_uses
            return PageState.FILLED if only_sent else PageState.QUARANTINED
        if self.uses[Use.REMOTE_WRITE]:
            return PageState.IN_FLIGHT
        return PageState.FILLED if self.filled else PageState.LEASED


class PagePool:
    """Leases pages to requests. Lease ids are made here and never reused, so a stale one is
    refused.

    A long prompt has thousands of pages, and whatever happens to all of them at once happens in one
    slice of the event loop: so what is known of each page is in arrays.
    """

    def __init__(self, num_pages: int, group: str = FULL_ATTENTION) -> None:
        #: The group of layers that the pages belong to.
        self.group = group
        assert num_pages > 0
        self.num_pages = num_pages
        # First in, first out: a page that was just given back is the last one to be given out
        # again.
        self._free: deque[int] = deque(range(num_pages))
        #: How many leases have each page.
        self._num_leases = np.zeros(num_pages, np.int32)
        #: The published pages by key. They are cached while no lease has them.
        self._page_of: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = [None] * num_pages
        self._is_published = np.zeros(num_pages, np.bool_)
        #: Each page's latest publication, as a number that no other one has.
        self._published_at = np.zeros(num_pages, np.int64)
        self._next_published_at = 1
        self._num_cached = 0
        #: Which page's last lease ended when: the smallest of the cached ones gives way first.
        self._left_at = np.zeros(num_pages, np.int64)
        self._next_left_at = 1
        #: Cached pages in that order, as it was when they were looked up, and their times.
        self._victims: NDArray[np.int64] = np.zeros((2, 0), np.int64)
        self._leases: dict[int, _Lease] = {}
        self._next_lease_id = 1

    @property
    def num_free(self) -> int:
        """Pages that a lease can have: free ones, and cached ones, which give way."""
        return len(self._free) + self._num_cached

    def lease(self, num_pages: int, shared: Sequence[int] = ()) -> int | None:
        """Reserve pages under a new lease id, all or none; None when there are not enough.

        Args:
            num_pages: pages besides the shared ones.
            shared: published pages, which come first in the lease.
        """
        if not self.fits(num_pages, shared):
            return None
        if shared:
            pages = np.array(shared, np.int64)
            assert self._is_published[pages].all(), f"not all of {shared} are published"
            self._num_cached -= int(np.count_nonzero(self._is_cached(pages)))
            self._num_leases[pages] += 1
        lease_id = self._next_lease_id
        self._next_lease_id += 1
        self._leases[lease_id] = _Lease([*shared, *self._take(num_pages)], len(shared))
        return lease_id

    def fits(self, num_pages: int, shared: Sequence[int] = ()) -> bool:
        """Whether there are enough for such a lease."""
        num_free = self.num_free
        if num_pages <= num_free and shared:
            num_free -= int(np.count_nonzero(self._is_cached(np.array(shared, np.int64))))
        return num_pages <= num_free

    def num_to_evict(self, num_pages: int) -> int:
        """How many of so many pages must leave the cache before they can be leased."""
        return max(0, num_pages - len(self._free))

    def evict_some(self, num_pages: int, most: int) -> bool:
        """Have cached pages give way, so many of them at most, to a lease of ``num_pages`` to come;
        whether nothing more can be done for it.
        """
        wanted = min(self.num_to_evict(num_pages), self._num_cached)
        if wanted:
            self._free.extend(self._evict(min(wanted, most)))
        return wanted <= most

    def touch(self, pages: Sequence[int]) -> None:
        """Published pages are about to be shared: those of them that are cached give way last."""
        places = np.array(pages, np.int64)
        self._leave(places[self._is_cached(places)][::-1])

    def publish(self, lease_id: int, first: int, keys: Sequence[bytes]) -> None:
        """The lease's pages from this place on are complete and stay as they are: others may share
        them.

        Does nothing where another page has the same content.
        """
        lease = self._live(lease_id)
        page_of, key_of = self._page_of, self._key_of
        pages = lease.page_indices[first : first + len(keys)]
        assert len(pages) == len(keys)
        places = np.array(pages, np.int64)
        if not page_of.keys().isdisjoint(keys) or any(map(key_of.__getitem__, pages)):
            new = {
                key: page
                for key, page in zip(keys, pages, strict=True)
                if key not in page_of and key_of[page] is None
            }
            keys, pages = list(new), list(new.values())
            places = np.array(pages, np.int64)
        page_of.update(zip(keys, pages, strict=True))
        for page, key in zip(pages, keys, strict=True):
            key_of[page] = key
        self._is_published[places] = True
        self._published_at[places] = self._next_published_at + np.arange(len(places))
        self._next_published_at += len(places)
        lease.num_published += len(pages)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages that were published under these keys, up to the first that is not there."""
        found: list[int] = []
        for begin in range(0, len(keys), _KEYS_A_LOOK):
            some = keys[begin : begin + _KEYS_A_LOOK]
            found += map(self._page_of.get, some, itertools.repeat(-1))
            if -1 in found[begin:]:
                return found[: found.index(-1, begin)]
        return found

    def publications(self, pages: Sequence[int]) -> array[int]:
        """What :meth:`num_unchanged` asks for, of published pages: numbers of 64 bits."""
        if not pages:
            return array("q")
        return array("q", self._published_at[np.array(pages, np.int64)].tobytes())

    def num_unchanged(self, pages: Sequence[int], publications: array[int]) -> int:
        """How many of these pages, from the first on, are still published as they were then."""
        if not pages:
            return 0
        places = np.array(pages, np.int64)
        is_same = self._published_at[places] == np.array(publications, np.int64)
        changed = np.flatnonzero(~(is_same & self._is_published[places]))
        return int(changed[0]) if len(changed) else len(places)

    def extend(self, lease_id: int, num_pages: int) -> list[int] | None:
        """Add pages to a lease, all or none; the new ones, None when there are not enough."""
        lease = self._live(lease_id)
        if num_pages > self.num_free:
            return None
        new = self._take(num_pages)
        lease.page_indices.extend(new)
        return new

    def page_indices(self, lease_id: int, first: int = 0) -> tuple[int, ...]:
        """The lease's pages, by position in the request, from a place on."""
        return tuple(self._live(lease_id).page_indices[first:])

    def num_pages_of(self, lease_id: int) -> int:
        """How many pages a lease has."""
        return len(self._live(lease_id).page_indices)

    def state(self, lease_id: int) -> PageState:
        """State of all pages of a lease; FREE once it has ended."""
        lease = self._leases.get(lease_id)
        return PageState.FREE if lease is None else lease.state

    def hold(self, lease_id: int, use: Use) -> None:
        """Somebody starts to touch the pages. Only a lease that was not given up can gain uses."""
        lease = self._live(lease_id)
        lease.uses[use] += 1
        lease.num_uses += 1

    def drop(self, lease_id: int, use: Use, proof: Proof | None = None) -> None:
        """Somebody has stopped touching the pages; frees them if the lease was given up and this
        was the last use.

        Args:
            proof: required for REMOTE_WRITE, and only there.
        """
        assert (proof is not None) == (use is Use.REMOTE_WRITE), f"{use} with proof {proof}"
        lease = self._leases[lease_id]
        assert lease.uses[use] > 0, f"lease {lease_id} has no {use}"
        lease.uses[use] -= 1
        lease.num_uses -= 1
        if proof is Proof.COUNTED:
            lease.filled = True
        if lease.retired and not lease.num_uses:
            self._free_pages(lease_id)

    def exchange(self, lease_id: int, old: Use, new: Use) -> None:
        """A use becomes another one at once; also on a lease that was given up."""
        lease = self._leases[lease_id]
        assert old is not Use.REMOTE_WRITE and lease.uses[old] > 0
        lease.uses[old] -= 1
        lease.uses[new] += 1

    def retire(self, lease_id: int) -> None:
        """The owner gives its lease up: the pages are free now, or quarantined until the last use
        ends.
        """
        lease = self._live(lease_id)
        lease.retired = True
        if not lease.num_uses:
            self._free_pages(lease_id)

    def counts(self) -> PageCounts:
        """Pages by state; checks that every page is accounted for."""
        leased = in_flight = quarantined = 0
        filled = len(self._page_of) - self._num_cached
        for lease in self._leases.values():
            num_pages = len(lease.page_indices) - lease.num_published
            match lease.state:
                case PageState.LEASED:
                    leased += num_pages
                case PageState.IN_FLIGHT:
                    in_flight += num_pages
                case PageState.QUARANTINED:
                    quarantined += num_pages
                case _:
                    filled += num_pages
        num_free, num_cached = len(self._free), self._num_cached
        counts = PageCounts(num_free, leased, in_flight, filled, quarantined, num_cached)
        assert counts.total == self.num_pages, f"{counts} do not add up to {self.num_pages}"
        return counts

    def _live(self, lease_id: int) -> _Lease:
        lease = self._leases[lease_id]
        assert not lease.retired, f"lease {lease_id} was given up"
        return lease

    def _take(self, num_pages: int) -> list[int]:
        free = self._free
        taken = [free.popleft() for _ in range(min(num_pages, len(free)))]
        while len(taken) < num_pages:
            taken += self._evict(num_pages - len(taken))
        self._num_leases[taken] = 1
        return taken

    def _evict(self, most: int) -> list[int]:
        """Pages that leave the cache, at least one; there are so many in it."""
        if not self._victims.shape[1]:
            self._look_up_victims(most)
        (pages, left_at), self._victims = self._victims[:, :most], self._victims[:, most:]
        # Since they were looked up some may have been shared, or have made way already.
        is_left = self._is_cached(pages) & (self._left_at[pages] == left_at)
        evicted: list[int] = pages[is_left].tolist()
        for page in evicted:
            key = self._key_of[page]
            assert key is not None
            del self._page_of[key]
            self._key_of[page] = None
        self._is_published[evicted] = False
        self._num_cached -= len(evicted)
        return evicted

    def _look_up_victims(self, wanted: int) -> None:
        """The cached pages whose turn it is. Whatever is cached later comes after them."""
        pages = np.flatnonzero(self._is_cached(slice(None)))
        assert len(pages), "more pages are wanted than are cached"
        most = max(wanted, _MIN_VICTIMS)
        if len(pages) > most:
            pages = pages[np.argpartition(self._left_at[pages], most - 1)[:most]]
        pages = pages[np.argsort(self._left_at[pages])]
        self._victims = np.stack((pages, self._left_at[pages]))

    def _is_cached(self, pages: NDArray[np.int64] | slice) -> NDArray[np.bool_]:
        is_cached: NDArray[np.bool_] = self._is_published[pages] & (self._num_leases[pages] == 0)
        return is_cached

    def _free_pages(self, lease_id: int) -> None:
        pages = np.array(self._leases.pop(lease_id).page_indices, np.int64)
        num_leases, is_published = self._num_leases[pages] - 1, self._is_published[pages]
        self._num_leases[pages] = num_leases
        self._free.extend(pages[~is_published].tolist())
        # The last page of a prefix gives way first: without the ones before it is of no use.
        cached = pages[is_published & (num_leases == 0)][::-1]
        self._leave(cached)
        self._num_cached += len(cached)

    def _leave(self, pages: NDArray[np.int64]) -> None:
        self._left_at[pages] = self._next_left_at + np.arange(len(pages))
        self._next_left_at += len(pages)
