"""How much of a text's end could be the beginning of a word that later text completes. Pure."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["partial_len"]


def partial_len(text: str, words: Iterable[str]) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of one of ``words``."""
    return max((_partial_len(text, word) for word in words), default=0)


def _partial_len(text: str, word: str) -> int:
    # Only where the first character is found is there anything to compare.
    start = text.find(word[0], max(0, len(text) - len(word) + 1))
    while start >= 0:
        if word.startswith(text[start:]):
            return len(text) - start
        start = text.find(word[0], start + 1)
    return 0
