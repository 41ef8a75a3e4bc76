"""Which pages of a request other requests have computed, and which of its own they may have.

Owned by the scheduler, on the primary's event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pdx.kv.pages import PagePool
from pdx.kv.prefix import next_key, root_key
from pdx.scheduler.request import Request, RequestState

__all__ = ["PrefixSharing"]

#: Pages hashed, and looked up, in one slice of the event loop: half a millisecond.
_PAGES_A_SLICE = 256
#: Pages that one request publishes in one: about as long.
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
        #: Requests that are not hashed yet, as they came.
        self._to_hash: deque[Request] = deque()
        #: Ended ones whose pages are not all published yet; their leases live until then.
        self._leaving: deque[Request] = deque()
        #: Pages that the next to be admitted wants to be free; 0: nobody waits for that.
        self._room_wanted = 0

    def hash_later(self, request: Request) -> None:
        """A request has come; it takes part once it is hashed."""
        if not self.is_hashed(request):
            self._to_hash.append(request)

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
            request = self._to_hash[0]
            place = min(self._num_prefilled_pages(request), len(request.page_keys) + budget)
            budget -= place - len(request.page_keys)
            if request.state is RequestState.WAITING and place:
                self._key(request, place - 1)
                self._look_up(request, place)
            if self.is_hashed(request) or request.state is not RequestState.WAITING:
                self._to_hash.popleft()

    def is_hashed(self, request: Request) -> bool:
        """All pages that its prefill fills have their keys."""
        if self._cache_root is None:
            return True
        return len(request.page_keys) >= self._num_prefilled_pages(request)

    def _num_prefilled_pages(self, request: Request) -> int:
        return request.prefill_len // self._page_size

    def known(self, request: Request) -> list[int]:
        """Published pages with a hashed request's first tokens, as many as there are in a row."""
        found, wanted = request.found_pages, self._num_wanted_pages(request)
        num_unchanged = self._pool.num_unchanged(found, request.found_publications)
        del found[num_unchanged:], request.found_publications[num_unchanged:]
        self._look_up(request, wanted)
        return found[:wanted].tolist()

    def lacks_one_page_at_most(self, request: Request) -> bool:
        """Whether an admitted request is known but for (a part of) its last page.

        Of a prompt that fills one page exactly, nothing can be shared: its last token is computed
        again, and a shared page is never written. It is known where that page is.
        """
        if request.prefill_len - request.num_cached >= self._page_size:
            return False
        if request.num_cached:
            return True
        fills_a_page = len(request.token_ids) == self._page_size
        if self._cache_root is None or not request.may_share or not fills_a_page:
            return False
        return bool(self._pool.find([self._key(request, 0)]))

    def _look_up(self, request: Request, stop: int) -> None:
        """Add to what was found of a request, up to a place or to the first that is missing."""
        found = self._pool.find(request.page_keys[len(request.found_pages) : stop])
        request.found_pages.extend(found)
        request.found_publications.extend(self._pool.publications(found))

    def lease(self, num_fresh: int, shared: list[int]) -> int | None:
        """Lease pages for a request, its shared ones first; None where there are not enough, or
        not yet: :meth:`go_on` makes room for them.
        """
        pool = self._pool
        if pool.num_to_evict(num_fresh) > _EVICTED_A_SLICE and pool.fits(num_fresh, shared):
            pool.touch(shared)
            self._room_wanted = num_fresh
            return None
        return pool.lease(num_fresh, shared)

    def lacks(self, request: Request, num_known: int) -> bytes | None:
        """The key of the first page that is not known; None where no other could be shared."""
        is_last = num_known >= self._num_wanted_pages(request)
        return None if is_last else self._key(request, num_known)

    def next_keys(self, active: Iterable[Request]) -> set[bytes]:
        """The key of the next page that each request which is being prefilled publishes.

        Whoever lacks this very page should wait: for it, and for all that follow until the two
        requests part.
        """
        return {key for request in active if (key := self._next_key(request)) is not None}

    def publish_some(self, request: Request) -> None:
        """Let others share pages whose tokens are all computed, as many as a slice of the event
        loop may take. Called after each of its passes; the rest comes when it leaves.
        """
        self._publish(request, request.num_published + _PUBLISHED_A_SLICE)

    def leave(self, request: Request) -> None:
        """Give the pages of an ended request up: now, or as soon as those that are computed are
        published.
        """
        assert request.lease_id is not None
        self.publish_some(request)
        if request.num_published < self._num_to_publish(request):
            self._leaving.append(request)
        else:
            self._pool.retire(request.lease_id)

    def leave_at_once(self, request: Request) -> None:
        """The same, whatever time it takes: somebody needs the pages."""
        assert request.lease_id is not None
        self._publish(request, self._num_to_publish(request))
        self._pool.retire(request.lease_id)

    def _num_to_publish(self, request: Request) -> int:
        if self._cache_root is None:
            return 0
        return request.num_computed // self._page_size

    def _publish(self, request: Request, most: int) -> None:
        """Publish its pages below a place, those whose tokens are all computed."""
        assert request.lease_id is not None
        first = request.num_published
        stop = min(most, self._num_to_publish(request))
        if stop <= first:
            return
        self._key(request, stop - 1)
        self._pool.publish(request.lease_id, first, request.page_keys[first:stop])
        request.num_published = stop

    def _num_wanted_pages(self, request: Request) -> int:
        if self._cache_root is None or not request.may_share:
            return 0
        return request.max_cached_len // self._page_size

    def _next_key(self, request: Request) -> bytes | None:
        place = request.num_published
        is_ended = request.state is RequestState.ENDED
        if self._cache_root is None or is_ended or place >= self._num_prefilled_pages(request):
            return None
        return self._key(request, place)

    def _key(self, request: Request, place: int) -> bytes:
        """The key of the request's page at a place; hashed now if it was not."""
        assert self._cache_root is not None
        keys, size = request.page_keys, self._page_size
        while len(keys) <= place:
            root = root_key(self._cache_root, request.cache_salt, self._pool.group)
            parent = keys[-1] if keys else root
            start = len(keys) * size
            keys.append(next_key(parent, request.token_ids[start : start + size]))
        return keys[place]
