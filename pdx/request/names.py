"""The ids by which clients know a request. They are for people, in log lines and look-ups: nothing
else depends on them.
"""

from __future__ import annotations

import msgspec

__all__ = ["MAX_NAME_LEN", "RequestNames", "clean_name"]

#: What is longer is cut.
MAX_NAME_LEN = 128


class RequestNames(msgspec.Struct, frozen=True, array_like=True):
    """Both ids of a request."""

    #: The answer's id, such as ``cmpl-...``.
    api_id: str = ""
    #: The ``X-Request-Id`` that its client sent, or that the frontend made.
    x_request_id: str = ""

    def __str__(self) -> str:
        """The request's name in log lines."""
        return f"{self.api_id or '-'} x-request-id {self.x_request_id or '-'}"

    def cleaned(self) -> RequestNames:
        """The same without what would spoil a log line."""
        return RequestNames(clean_name(self.api_id), clean_name(self.x_request_id))


def clean_name(text: str) -> str:
    """The printable ASCII characters of a name that somebody sent, without spaces, at most
    MAX_NAME_LEN of them.
    """
    return "".join(char for char in text if "!" <= char <= "~")[:MAX_NAME_LEN]
