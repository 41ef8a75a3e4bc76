"""How the C heap of a process that serves sockets is used. Called once, before the loop runs."""

from __future__ import annotations

import ctypes

__all__ = ["keep_receive_buffers_apart"]

_M_MMAP_THRESHOLD = -3
#: Below asyncio's receive buffers, 256 KiB for each read.
_APART_FROM_BYTES = 128 << 10


def keep_receive_buffers_apart() -> None:
    """Take large blocks from the kernel and give them back, always.

    glibc would move its limit up when the first one is freed, and from then on put each receive
    buffer on the heap: cut down to what was read, they leave holes, and a node's memory grows for
    an hour under load. Another C library does without.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _APART_FROM_BYTES)
