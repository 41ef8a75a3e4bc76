"""Stop strings in a text that comes in pieces.

Owned by whoever serves one output. What could still become a stop string is held back, so that a
piece that has gone out never has to be taken back. The result does not depend on how the text was
cut into pieces: the stop string that is complete first ends the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdx.text.partial_match import partial_len

__all__ = ["StopStrings"]


class StopStrings:
    """Finds the first of ``stops`` (none of them empty) in one output. ``keep`` leaves it at the
    text's end."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = tuple(stops)
        self._keep = keep
        self._held = ""
        #: The stop string that has ended the text; nothing may be pushed after it.
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that no later text can make part of a stop string."""
        assert self.matched is None
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._keep else start]
        cut = len(text) - partial_len(text, self._stops)
        self._held = text[cut:]
        return text[:cut]

    def skip(self, text: str) -> str:
        """Let text through in which stop strings do not count."""
        text, self._held = self._held + text, ""
        return text

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        return self.skip("")
