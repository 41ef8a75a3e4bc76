"""Which pages of a sequence other sequences have computed, and which of its own they may have.

Owned by the scheduler, on the primary's event loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdx.kv.pages import PagePool
from pdx.kv.prefix import next_key, root_key
from pdx.scheduler.sequence import Sequence, SequenceState

__all__ = ["PrefixSharing"]


class PrefixSharing:
    """See the module's docstring.

    Args:
        cache_root: names what the KV depends on besides tokens; None: nothing is shared.
    """

    def __init__(self, pool: PagePool, page_size: int, cache_root: str | None) -> None:
        self._pool = pool
        self._page_size = page_size
        self._cache_root = cache_root

    def known(self, sequence: Sequence) -> list[int]:
        """Published pages with the sequence's first tokens, as many as there are in a row."""
        pages: list[int] = []
        while (key := self._wanted_key(sequence, len(pages))) is not None:
            page = self._pool.find(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def lacks(self, sequence: Sequence, num_known: int) -> bytes | None:
        """The key of the first page that is not known; None where no other could be shared."""
        return self._wanted_key(sequence, num_known)

    def next_keys(self, active: Iterable[Sequence]) -> set[bytes]:
        """Of each sequence that is being prefilled, the key of the next page that it publishes.

        Whoever lacks this very page should wait: for it, and for all that follow until the two
        sequences part.
        """
        return {key for sequence in active if (key := self._next_key(sequence)) is not None}

    def publish(self, sequence: Sequence) -> None:
        """Let others share the pages whose tokens are all computed."""
        assert sequence.lease_id is not None
        num_full = sequence.num_computed // self._page_size
        if self._cache_root is None:
            return
        for place in range(sequence.num_published, num_full):
            self._pool.publish(sequence.lease_id, place, self._key(sequence, place))
        sequence.num_published = max(sequence.num_published, num_full)

    def _wanted_key(self, sequence: Sequence, place: int) -> bytes | None:
        if self._cache_root is None or not sequence.may_share:
            return None
        if place >= sequence.max_cached_len // self._page_size:
            return None
        return self._key(sequence, place)

    def _next_key(self, sequence: Sequence) -> bytes | None:
        place = sequence.num_published
        is_ended = sequence.state is SequenceState.ENDED
        if self._cache_root is None or is_ended or place >= sequence.prefill_len // self._page_size:
            return None
        return self._key(sequence, place)

    def _key(self, sequence: Sequence, place: int) -> bytes:
        """Of the sequence's page at a place, hashed when it is first asked for."""
        assert self._cache_root is not None
        keys, size = sequence.page_keys, self._page_size
        while len(keys) <= place:
            parent = keys[-1] if keys else root_key(self._cache_root, sequence.cache_salt)
            start = len(keys) * size
            keys.append(next_key(parent, sequence.token_ids[start : start + size]))
        return keys[place]
