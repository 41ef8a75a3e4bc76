"""A text that comes in pieces, for readers that are written as if all of it were there.

A reader is a generator: where the text that it needs has not come yet, it yields, and it goes on
from there when more has been pushed. So each character is looked at once however the text is cut,
and the result cannot depend on the cuts.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Generator, Sequence
from typing import TypeAlias, TypeVar

__all__ = ["Reading", "Source"]

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]


class Source:
    """The text, and where its reader stands. Positions count characters from the text's start."""

    def __init__(self) -> None:
        self._chunks = [""]
        #: Position of each chunk's first character.
        self._starts = [0]
        self._chunk_idx = 0
        #: Characters of that chunk that have been read.
        self._at = 0
        #: No more will be pushed.
        self.is_ended = False

    @property
    def position(self) -> int:
        """Where the next character to be read is."""
        return self._starts[self._chunk_idx] + self._at

    def push(self, text: str) -> None:
        """Add to the end."""
        if text:
            self._starts.append(self._starts[-1] + len(self._chunks[-1]))
            self._chunks.append(text)

    def rewind(self, position: int) -> None:
        """Read on from here: a position that has not been forgotten."""
        self._chunk_idx = bisect_right(self._starts, position) - 1
        self._at = position - self._starts[self._chunk_idx]

    def forget(self) -> None:
        """Drop chunks that have been read: nobody will rewind to them."""
        del self._chunks[: self._chunk_idx], self._starts[: self._chunk_idx]
        self._chunk_idx = 0

    def text(self, start: int, end: int) -> str:
        """Text that has been pushed and not forgotten."""
        first = bisect_right(self._starts, start) - 1
        last = bisect_right(self._starts, end, lo=first) - 1
        if first == last:
            return self._chunks[first][start - self._starts[first] : end - self._starts[first]]
        parts = self._chunks[first : last + 1]
        parts[0] = parts[0][start - self._starts[first] :]
        parts[-1] = parts[-1][: end - self._starts[last]]
        return "".join(parts)

    def has_more(self) -> Reading[bool]:
        """Whether there is a next character; waits until that is known."""
        while self._at == len(self._chunks[self._chunk_idx]):
            if self._chunk_idx + 1 < len(self._chunks):
                self._chunk_idx += 1
                self._at = 0
            elif self.is_ended:
                return False
            else:
                yield
        return True

    def peek(self) -> Reading[str]:
        """The next character, which stays unread; empty at the end."""
        more = yield from self.has_more()
        return self._chunks[self._chunk_idx][self._at] if more else ""

    def pass_char(self) -> None:
        """Read the character that `peek` has shown."""
        self._at += 1

    def skip(self, run: re.Pattern[str]) -> Reading[None]:
        """Read as far as characters fit; ``run`` is a class of characters with a star."""
        while (yield from self.has_more()):
            chunk = self._chunks[self._chunk_idx]
            found = run.match(chunk, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(chunk):
                return

    def take(self, run: re.Pattern[str]) -> Reading[str]:
        """Read as `skip` does; what was read."""
        start = self.position
        yield from self.skip(run)
        return self.text(start, self.position)

    def take_now(self, run: re.Pattern[str]) -> str:
        """What `take` reads without waiting, at most to the end of a piece."""
        chunk = self._chunks[self._chunk_idx]
        found = run.match(chunk, self._at)
        assert found is not None
        self._at = found.end()
        return found[0]

    def match(self, words: Sequence[str]) -> Reading[str | None]:
        """Read one of these words, none of which begins another. None: the next characters are
        none of them; those that agree with one have been read."""
        seen = ""
        while seen not in words:
            char = yield from self.peek()
            if not char or not any(word.startswith(seen + char) for word in words):
                return None
            seen += char
            self.pass_char()
        return seen
