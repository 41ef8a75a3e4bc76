"""Which transfers wait for which progress words, so that a stored word brings the worker a turn.
Owned by the worker.
"""

from __future__ import annotations

from collections.abc import Callable

from pdx.lab.simulated_fabric.memory import AddressSpace

__all__ = ["WordWatch"]


class WordWatch:
    """Calls ``wake`` at each store to a word that a transfer waits for."""

    def __init__(self, memory: AddressSpace, wake: Callable[[], None]) -> None:
        self._memory = memory
        self._wake = wake
        self._watched: dict[int, set[int]] = {}

    def waiting(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Each transfer that waits, with its words and their values now."""
        return [
            (transfer, [(word, self._memory.load_word(word)) for word in sorted(words)])
            for transfer, words in self._watched.items()
        ]

    def watch(self, transfer: int, words: set[int]) -> None:
        """From here on the transfer waits for these words and no others."""
        before = self._watched.pop(transfer, set())
        if words:
            self._watched[transfer] = words
        for word in sorted(before - words):
            self._memory.unwatch_word(word, self._wake)
        for word in sorted(words - before):
            self._memory.watch_word(word, self._wake)

    def stop(self) -> None:
        """Nobody waits any more."""
        for transfer in list(self._watched):
            self.watch(transfer, set())
