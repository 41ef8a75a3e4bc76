"""Which pages of a sequence other sequences have computed, and which of its own they may have.

Owned by the scheduler, on the primary's event loop.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdx.kv.pages import PagePool
from pdx.kv.prefix import next_key, root_key
from pdx.scheduler.sequence import Sequence

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
        if not sequence.may_share:
            return pages
        for key in self._keys(sequence, sequence.max_cached_len // self._page_size):
            page = self._pool.find(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, sequence: Sequence) -> None:
        """Let others share the pages whose tokens are all computed."""
        assert sequence.lease_id is not None
        num_full = sequence.num_computed // self._page_size
        if num_full <= sequence.num_published:
            return
        for place, key in enumerate(self._keys(sequence, num_full)):
            if place >= sequence.num_published:
                self._pool.publish(sequence.lease_id, place, key)
        sequence.num_published = num_full

    def _keys(self, sequence: Sequence, num_pages: int) -> Iterator[bytes]:
        """Keys of the sequence's first pages, hashed when they are first asked for."""
        if self._cache_root is None:
            return
        keys, size = sequence.page_keys, self._page_size
        for place in range(num_pages):
            if place == len(keys):
                parent = keys[-1] if keys else root_key(self._cache_root, sequence.cache_salt)
                tokens = sequence.token_ids[place * size : (place + 1) * size]
                keys.append(next_key(parent, tokens))
            yield keys[place]
