"""A rank never outlives its primary. Called once, first thing in the process."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1
_PEER_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


def die_with_parent(sock: socket.socket) -> None:
    """Have the kernel kill this process when its parent ends, even while a pass runs.

    The kernel signals when the *thread* that started us ends, so a primary starts its ranks from a
    thread that lives as long as it does.

    Args:
        sock: one end of a socketpair that the parent made; it remembers its maker.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have ended before the line above; then somebody else has adopted us already.
    # (Pid 0: it lives in another pid namespace, which cannot be compared; the socket's end still
    # ends us.)
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    maker: int = _PEER_CREDENTIALS.unpack(raw)[0]
    if maker not in (0, os.getppid()):
        raise SystemExit(1)
