"""What a node tells whoever supervises it: how far it has loaded, and that it serves.

Lines of JSON through a pipe whose descriptor the environment names: log lines, which users read and
which change, carry no data. Written on the node's event loop; a supervisor that does not read holds
nothing up.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

import msgspec

from pdx.config.environment import DESCRIPTOR_VARIABLE

__all__ = ["Loading", "NodeReport", "Ready", "Reporter", "parse_report"]


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag="loading"):
    """So many bytes of the weights have been read."""

    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The node serves at this address, HOST:PORT: a prefiller's control address, a decoder's
    API.
    """

    address: str


NodeReport = Loading | Ready
_decoder = msgspec.json.Decoder(NodeReport)


def parse_report(line: bytes) -> NodeReport | None:
    """The report of a line; None: it is none."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None


class Reporter:
    """Reports to the supervisor, where there is one."""

    def __init__(self, env: Mapping[str, str]) -> None:
        given = env.get(DESCRIPTOR_VARIABLE, "")
        self._fd = int(given) if given.isdigit() else None
        if self._fd is None:
            return
        try:
            os.set_blocking(self._fd, False)
            os.set_inheritable(self._fd, False)
        except OSError:  # left over in the environment of somebody who has no such pipe
            self._fd = None

    @property
    def is_heard(self) -> bool:
        """Whether there is a supervisor."""
        return self._fd is not None

    def send(self, report: NodeReport) -> None:
        """Tell it. Lost where the supervisor has not read for long, or is gone."""
        if self._fd is None:
            return
        # So short a line goes into a pipe whole or not at all.
        with contextlib.suppress(OSError):
            os.write(self._fd, msgspec.json.encode(report) + b"\n")
