"""A primary in a process of its own: starts a rank, tells its pid, waits to be killed."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec

from pdx.request.rank import RankConfig
from tests.runner.rank_process import RankProcess


def main() -> None:
    test = socket.socket(fileno=int(sys.argv[1]))
    config = msgspec.json.decode(test.makefile("rb").readline(), type=RankConfig)
    rank = RankProcess(config)
    rank.wait_ready()
    # A second holder of our end: the rank must not need the end of the stream to know that we are
    # gone.
    if os.fork() == 0:
        test.close()
        threading.Event().wait(60)
        os._exit(0)
    test.sendall(f"{rank.process.pid}\n".encode())
    threading.Event().wait(60)


if __name__ == "__main__":
    main()
