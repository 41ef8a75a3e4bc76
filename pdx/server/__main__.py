"""``python -m pdx.server --fd N``: the frontend process, started by a primary. ``N`` is its end of
the socket pair."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import signal
import socket
import sys

from pdx.process.descriptors import raise_descriptor_limit
from pdx.process.heap import keep_receive_buffers_apart
from pdx.process.logs import set_up_from_environment
from pdx.server.frontend import serve

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run until the primary closes the socket or dies."""
    parser = argparse.ArgumentParser(prog="python -m pdx.server", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited UNIX stream socket")
    fd = parser.parse_args().fd
    # Ctrl-C reaches the whole process group; what it means is the primary's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    set_up_from_environment("frontend")
    keep_receive_buffers_apart()
    raise_descriptor_limit()
    return asyncio.run(serve(socket.socket(fileno=fd)))


if __name__ == "__main__":
    sys.exit(main())
