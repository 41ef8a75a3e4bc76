"""Addresses of a simulated machine room: buffers that can be found by address. No pointers, so
that a history does not depend on where the allocator put something.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, cast

from numpy.typing import NDArray

from pdx.errors import FabricError

__all__ = ["AddressSpace"]

_PAGE_BYTES = 4096


class AddressSpace:
    """Maps buffers and progress words to addresses that are used once."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._views: list[memoryview] = []
        self._next = 1 << 20
        #: Progress words that were looked at, by address.
        self._words: dict[int, memoryview] = {}
        self._watchers: dict[int, list[Callable[[], None]]] = {}

    def map(self, buffer: bytearray | memoryview | NDArray[Any]) -> int:
        """The address of a writable, contiguous buffer, until unmap()."""
        view = memoryview(cast(bytearray, buffer)).cast("B")  # arrays are buffers as well
        address = self._next
        # A page of nothing between two buffers: a write past the end meets no neighbour.
        self._next += (len(view) // _PAGE_BYTES + 2) * _PAGE_BYTES
        self._bases.append(address)
        self._views.append(view)
        return address

    def unmap(self, address: int) -> None:
        """Forget a buffer."""
        index = self._bases.index(address)
        del self._bases[index], self._views[index]
        self._words.clear()

    def view(self, address: int, num_bytes: int) -> memoryview:
        """The bytes at an address.

        Raises:
            FabricError: no mapped buffer holds them.
        """
        index = bisect_right(self._bases, address) - 1
        if index >= 0:
            view = self._views[index]
            start = address - self._bases[index]
            stop = start + num_bytes
            if stop <= len(view):
                return view[start:stop]
        raise FabricError(f"{num_bytes} bytes at {address:#x} are not mapped memory")

    def load_word(self, address: int) -> int:
        """A progress word."""
        word: int = self._word(address)[0]
        return word

    def store_word(self, address: int, value: int) -> None:
        """Store a progress word, and let who waits for it look."""
        self._word(address)[0] = value
        for watcher in self._watchers.get(address, ()):
            watcher()

    def _word(self, address: int) -> memoryview:
        word = self._words.get(address)
        if word is None:
            word = self._words[address] = self.view(address, 8).cast("Q")
        return word

    def watch_word(self, address: int, watcher: Callable[[], None]) -> None:
        """Call ``watcher`` at each store."""
        self._watchers.setdefault(address, []).append(watcher)

    def unwatch_word(self, address: int, watcher: Callable[[], None]) -> None:
        """The end of watch_word()."""
        watchers = self._watchers[address]
        watchers.remove(watcher)
        if not watchers:
            del self._watchers[address]
