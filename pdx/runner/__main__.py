"""``python -m pdx.runner --fd N``: a rank on the socket that its primary passed down. Main thread.

torch is imported last, because that takes seconds in which an interrupt or the primary's death must
already be handled.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
import sys
import traceback

from pdx.errors import InternalError, PdxError
from pdx.process.heap import keep_freed_memory
from pdx.request.rank import RankFailed
from pdx.runner.channel import Channel
from pdx.runner.parent import die_with_parent

__all__ = ["main"]


def main() -> int:
    """Serve the primary until it closes the socket; 1 after a failure, which it has been told."""
    # A terminal's Ctrl-C goes to the whole process group; the primary decides when ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # torch's compute threads spin while they wait for one another. Where a prefiller, a decoder and
    # fabric workers share a few cores, a spinning thread keeps the awaited one from running: on two
    # busy cores a decode step took 5 to 10 times as long. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # oneDNN keeps what it compiled for each shape, 0.7 MiB a piece: a rank whose passes have all
    # lengths grew by 1 GiB before its caches of 1,024 were full. Read when torch is imported.
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")
    if os.environ.get("PDX_KERNELS") == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported
    keep_freed_memory()
    parser = argparse.ArgumentParser(prog="python -m pdx.runner", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited UNIX stream socket")
    sock = socket.socket(fileno=parser.parse_args().fd)
    die_with_parent(sock)
    channel = Channel(sock)
    try:
        from pdx.runner.process import serve

        serve(channel)
    except Exception as error:  # noqa: BLE001 (the edge of the process: whatever it is, the primary is told)
        if not isinstance(error, PdxError):
            error = InternalError(f"{type(error).__name__}: {error}").with_traceback(
                error.__traceback__
            )
        told = "".join(traceback.format_exception(error))
        if isinstance(error, InternalError):  # the others are refusals: their message says it all
            print(told, file=sys.stderr)  # noqa: T201
        channel.send(
            RankFailed(
                kind=type(error).__name__, message=error.message, hint=error.hint, traceback=told
            )
        )
        # The end of the interpreter would look through all of torch for garbage: on a busy machine
        # that takes longer than a primary waits for a rank to end.
        gc.freeze()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
