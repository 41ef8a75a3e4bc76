"""How a link ended, and the fault that is counted for it. Used by both sides of a link, on the
primary's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno

from pdx.errors import PeerLost, ProtocolError
from pdx.fabric import LinkDown
from pdx.messenger.control import ControlConnection
from pdx.messenger.messages import ControlMessage, Goodbye
from pdx.metrics.faults import Fault

__all__ = ["LinkEnd", "fault_of_error", "fault_of_link_down"]

#: So long a link whose data path broke listens for what the peer says of it.
_LAST_WORD_S = 0.25


class LinkEnd:
    """A link's end: its reason for people, and its fault for the counters.

    An error on the data path is often the first sign of something else: the peer was killed, or
    has ended the link itself. What the control connection brings soon after says which, so the
    fault is final only when :meth:`await_last_word` has returned. All else is known at once.
    """

    def __init__(self, reason: str, fault: Fault | None) -> None:
        self.reason = reason
        self.fault = fault
        #: Nothing that comes later names another fault.
        self._is_final = fault is not Fault.DATA_PATH

    def tell(self, connection: ControlConnection, *, no_data_path: bool) -> None:
        """Say it to the peer, which counts the same fault, and stop listening."""
        with contextlib.suppress(PeerLost):
            connection.send(
                Goodbye(reason=self.reason, fault=self.fault, no_data_path=no_data_path)
            )
        if self._is_final:
            connection.hang_up()
        else:
            asyncio.get_running_loop().call_later(_LAST_WORD_S, connection.hang_up)

    def on_link_down(self, fault: Fault) -> None:
        """The data path's own reason comes after something else had found that it is broken."""
        if not self._is_final:
            self.fault = fault

    def hear(self, message: ControlMessage) -> None:
        """What the peer has sent after the end."""
        if isinstance(message, Goodbye) and not self._is_final:
            self.fault, self._is_final = message.fault, True

    async def await_last_word(self, connection: ControlConnection) -> None:
        """Read what the peer still says; returns at once where that does not matter."""
        try:
            while not self._is_final:
                self.hear(await connection.receive())
        except (PeerLost, ProtocolError):
            if not connection.has_hung_up:
                self.fault = Fault.CONNECTION_LOST


def fault_of_link_down(event: LinkDown, *, was_up: bool) -> Fault:
    """The fault when a data path was lost."""
    if not was_up:
        return Fault.NO_DATA_PATH
    return Fault.NO_BEAT if event.code == errno.ETIMEDOUT else Fault.DATA_PATH


def fault_of_error(error: PeerLost | ProtocolError) -> Fault:
    """The fault when the control connection could not be read."""
    return Fault.PROTOCOL if isinstance(error, ProtocolError) else Fault.CONNECTION_LOST
