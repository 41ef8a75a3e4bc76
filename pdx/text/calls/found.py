"""What reading one call comes to."""

from __future__ import annotations

from dataclasses import dataclass

from pdx.text.calls.form import ToolCall

__all__ = ["MAX_NAME_CHARS", "Found", "NoCall"]

#: What is longer is no name of a function or of a parameter.
MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Calls that end where the source stands."""

    calls: list[ToolCall]
    #: The call's end tag has been read with it.
    is_closed: bool
    #: Position up to which the text was read to find the end, if that is far behind it.
    read_to: int = 0


class NoCall(Exception):
    """What was begun is no call. ``end``: the position up to which it is text, in which no call is
    looked for; None: only its start tag is.
    """

    def __init__(self, end: int | None = None) -> None:
        super().__init__()
        self.end = end
