"""Which pages of a sequence other sequences have computed, and which of its own they may have.

Owned by the scheduler, on the primary's event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pdx.kv.pages import PagePool
from pdx.kv.prefix import next_key, root_key
from pdx.scheduler.sequence import Sequence, SequenceState

__all__ = ["PrefixSharing"]

#: Pages hashed, and looked up, in one slice of the event loop: half a millisecond.
_PAGES_A_SLICE = 256
#: Pages that one sequence publishes in one: about as long.
_PUBLISHED_A_SLICE = 2048
#: Pages that leave the cache in one.
_EVICTED_A_SLICE = 2048


class PrefixSharing:
    """See the module's docstring.

    Args:
        cache_root: names what the KV depends on besides tokens; None: nothing is shared.
    """

    def __init__(self, pool: PagePool, page_size: int, cache_root: str | None) -> None:
        self._pool = pool
        self._page_size = page_size
        self._cache_root = cache_root
        #: Sequences that are not hashed yet, as they came.
        self._to_hash: deque[Sequence] = deque()
        #: Ended ones whose pages are not all published yet; their leases live until then.
        self._leaving: deque[Sequence] = deque()
        #: Pages that the next to be admitted wants to be free; 0: nobody waits for that.
        self._room_wanted = 0

    def hash_later(self, sequence: Sequence) -> None:
        """A sequence has come; it takes part once it is hashed."""
        if not self.is_hashed(sequence):
            self._to_hash.append(sequence)

    @property
    def is_busy(self) -> bool:
        """Some are not hashed yet, ended and not published whole, or wait for pages to leave the
        cache.
        """
        return bool(self._to_hash or self._leaving or self._room_wanted)

    def go_on(self) -> None:
        """Hash, publish or evict what a slice of the event loop may take."""
        if self._leaving:
            self.leave(self._leaving.popleft())
            return
        if self._room_wanted:
            if self._pool.evict_some(self._room_wanted, _EVICTED_A_SLICE):
                self._room_wanted = 0
            return
        budget = _PAGES_A_SLICE
        while self._to_hash and budget > 0:
            sequence = self._to_hash[0]
            place = min(self._num_prefilled_pages(sequence), len(sequence.page_keys) + budget)
            budget -= place - len(sequence.page_keys)
            if sequence.state is SequenceState.WAITING and place:
                self._key(sequence, place - 1)
                self._look_up(sequence, place)
            if self.is_hashed(sequence) or sequence.state is not SequenceState.WAITING:
                self._to_hash.popleft()

    def is_hashed(self, sequence: Sequence) -> bool:
        """All pages that its prefill fills have their keys."""
        if self._cache_root is None:
            return True
        return len(sequence.page_keys) >= self._num_prefilled_pages(sequence)

    def _num_prefilled_pages(self, sequence: Sequence) -> int:
        return sequence.prefill_len // self._page_size

    def known(self, sequence: Sequence) -> list[int]:
        """Published pages with a hashed sequence's first tokens, as many as there are in a row."""
        found, wanted = sequence.found_pages, self._num_wanted_pages(sequence)
        num_unchanged = self._pool.num_unchanged(found, sequence.found_publications)
        del found[num_unchanged:], sequence.found_publications[num_unchanged:]
        self._look_up(sequence, wanted)
        return found[:wanted].tolist()

    def lacks_one_page_at_most(self, sequence: Sequence) -> bool:
        """Whether an admitted sequence is known but for (a part of) its last page.

        Of a prompt that fills one page exactly, nothing can be shared: its last token is computed
        again, and a shared page is never written. It is known where that page is.
        """
        if sequence.prefill_len - sequence.num_cached >= self._page_size:
            return False
        if sequence.num_cached:
            return True
        fills_a_page = len(sequence.token_ids) == self._page_size
        if self._cache_root is None or not sequence.may_share or not fills_a_page:
            return False
        return bool(self._pool.find([self._key(sequence, 0)]))

    def _look_up(self, sequence: Sequence, stop: int) -> None:
        """Add to what was found of a sequence, up to a place or to the first that is missing."""
        found = self._pool.find(sequence.page_keys[len(sequence.found_pages) : stop])
        sequence.found_pages.extend(found)
        sequence.found_publications.extend(self._pool.publications(found))

    def lease(self, num_fresh: int, shared: list[int]) -> int | None:
        """Lease pages for a sequence, its shared ones first; None where there are not enough, or
        not yet: :meth:`go_on` makes room for them.
        """
        pool = self._pool
        if pool.num_to_evict(num_fresh) > _EVICTED_A_SLICE and pool.fits(num_fresh, shared):
            pool.touch(shared)
            self._room_wanted = num_fresh
            return None
        return pool.lease(num_fresh, shared)

    def lacks(self, sequence: Sequence, num_known: int) -> bytes | None:
        """The key of the first page that is not known; None where no other could be shared."""
        is_last = num_known >= self._num_wanted_pages(sequence)
        return None if is_last else self._key(sequence, num_known)

    def next_keys(self, active: Iterable[Sequence]) -> set[bytes]:
        """Of each sequence that is being prefilled, the key of the next page that it publishes.

        Whoever lacks this very page should wait: for it, and for all that follow until the two
        sequences part.
        """
        return {key for sequence in active if (key := self._next_key(sequence)) is not None}

    def publish_some(self, sequence: Sequence) -> None:
        """Let others share pages whose tokens are all computed, as many as a slice of the event
        loop may take. Called after each of its passes; the rest comes when it leaves.
        """
        self._publish(sequence, sequence.num_published + _PUBLISHED_A_SLICE)

    def leave(self, sequence: Sequence) -> None:
        """Give the pages of an ended sequence up: now, or as soon as those that are computed are
        published.
        """
        assert sequence.lease_id is not None
        self.publish_some(sequence)
        if sequence.num_published < self._num_to_publish(sequence):
            self._leaving.append(sequence)
        else:
            self._pool.retire(sequence.lease_id)

    def leave_at_once(self, sequence: Sequence) -> None:
        """The same, whatever time it takes: somebody needs the pages."""
        assert sequence.lease_id is not None
        self._publish(sequence, self._num_to_publish(sequence))
        self._pool.retire(sequence.lease_id)

    def _num_to_publish(self, sequence: Sequence) -> int:
        if self._cache_root is None:
            return 0
        return sequence.num_computed // self._page_size

    def _publish(self, sequence: Sequence, most: int) -> None:
        """Publish its pages below a place, those whose tokens are all computed."""
        assert sequence.lease_id is not None
        first = sequence.num_published
        stop = min(most, self._num_to_publish(sequence))
        if stop <= first:
            return
        self._key(sequence, stop - 1)
        self._pool.publish(sequence.lease_id, first, sequence.page_keys[first:stop])
        sequence.num_published = stop

    def _num_wanted_pages(self, sequence: Sequence) -> int:
        if self._cache_root is None or not sequence.may_share:
            return 0
        return sequence.max_cached_len // self._page_size

    def _next_key(self, sequence: Sequence) -> bytes | None:
        place = sequence.num_published
        is_ended = sequence.state is SequenceState.ENDED
        if self._cache_root is None or is_ended or place >= self._num_prefilled_pages(sequence):
            return None
        return self._key(sequence, place)

    def _key(self, sequence: Sequence, place: int) -> bytes:
        """Of the sequence's page at a place; hashed now if it was not."""
        assert self._cache_root is not None
        keys, size = sequence.page_keys, self._page_size
        while len(keys) <= place:
            parent = keys[-1] if keys else root_key(self._cache_root, sequence.cache_salt)
            start = len(keys) * size
            keys.append(next_key(parent, sequence.token_ids[start : start + size]))
        return keys[place]
