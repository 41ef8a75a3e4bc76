"""NIXL and Mooncake in the pattern of `pdx bench transfer`, run as a file by their own environment.

Imports NumPy, pattern.py beside it, and the peer; never pdx. A writer process reads a cell a line
on its input; its child holds the other pool. With NIXL the clock stops when the target has every
batch's notification. Mooncake's Python call has none, so its own completion is trusted. The target
then compares every byte.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING or __package__:
    from pdx.lab.transfers.pattern import Cell, count_wrong, fill, map_pool, order_of, slices_of
else:  # this file's folder is where Python looks first
    from pattern import Cell, count_wrong, fill, map_pool, order_of, slices_of

_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1


class Line:
    """Lines of JSON to the other process; it can be polled, since NIXL progresses only in calls."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._kept = b""

    def send(self, message: Any) -> None:
        self._connection.setblocking(True)
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def poll(self) -> Any:
        """A message, or None."""
        self._connection.setblocking(False)
        try:
            self._take()
        except BlockingIOError:
            return None
        return self._next()

    def receive(self) -> Any:
        self._connection.settimeout(None)
        while (message := self._next()) is None:
            self._take()
        return message

    def _take(self) -> None:
        got = self._connection.recv(1 << 20)
        if not got:
            os._exit(0)
        self._kept += got

    def _next(self) -> Any:
        line, newline, rest = self._kept.partition(b"\n")
        if not newline:
            return None
        self._kept = rest
        return json.loads(line)


class Nixl:
    """Both sides of NIXL with UCX."""

    def __init__(self, name: str, pool: NDArray[np.uint8], line: Line, thread: bool) -> None:
        from nixl._api import (  # type: ignore[import-not-found]
            nixl_agent,
            nixl_agent_config,
        )

        options: dict[str, Any] = {"backends": []}
        if not thread:
            options["enable_prog_thread"] = False
        self._agent = nixl_agent(name, nixl_agent_config(**options))
        self._agent.create_backend("UCX", {})
        self._base = pool.ctypes.data
        self._agent.register_memory([(self._base, len(pool), 0, "")], "DRAM")
        line.send([self._agent.get_agent_metadata().hex(), self._base])
        metadata, self._remote_base = line.receive()
        self._agent.add_remote_agent(bytes.fromhex(metadata))
        self._line = line

    def prepare(self, cell: Cell) -> None:
        offsets = np.arange(cell.pool_bytes // cell.page_bytes, dtype=np.uint64) * np.uint64(
            cell.page_bytes
        )

        def described(base: int) -> Any:
            size = np.full(len(offsets), cell.page_bytes, np.uint64)
            table = np.stack([offsets + np.uint64(base), size, np.zeros_like(size)], axis=1)
            return self._agent.get_xfer_descs(table, "DRAM")

        self._local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", described(self._base))
        self._remote = self._agent.prep_xfer_dlist("target", described(self._remote_base))
        self._src, self._dst = (order.astype(np.int32) for order in order_of(cell))
        self.write(slice(0, 1), b"first")  # connects

    def write(self, pages: slice, notification: bytes = b"batch") -> None:
        handle = self._agent.make_prepped_xfer(
            "WRITE", self._local, self._src[pages], self._remote, self._dst[pages], notification
        )
        state = self._agent.transfer(handle)
        until = time.monotonic() + _TIMEOUT_S
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
            if time.monotonic() > until:
                raise SystemExit("NIXL: timeout")
        if state != "DONE":
            raise SystemExit(f"NIXL: {state}")
        self._agent.release_xfer_handle(handle)

    def finish(self) -> None:
        self._agent.release_dlist_handle(self._local)
        self._agent.release_dlist_handle(self._remote)

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def count(self) -> int:
        """Batches that the target has been told of since the last call."""
        return sum(each.count(b"batch") for each in self._agent.get_new_notifs().values())


class Mooncake:
    """Both sides of Mooncake's transfer engine over TCP."""

    def __init__(self, name: str, pool: NDArray[np.uint8], line: Line, thread: bool) -> None:
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise SystemExit("Mooncake: initialize")
        self._base = pool.ctypes.data
        if self._engine.register_memory(self._base, len(pool)):
            raise SystemExit("Mooncake: register_memory")
        line.send([f"127.0.0.1:{self._engine.get_rpc_port()}", self._base])
        self._peer, self._remote_base = line.receive()

    def prepare(self, cell: Cell) -> None:
        src, dst = order_of(cell)
        self._bytes = cell.page_bytes
        self._src = (src.astype(np.int64) * cell.page_bytes + self._base).tolist()
        self._dst = (dst.astype(np.int64) * cell.page_bytes + self._remote_base).tolist()
        self.write(slice(0, 1))

    def write(self, pages: slice) -> None:
        src = self._src[pages]
        sizes = [self._bytes] * len(src)
        if self._engine.batch_transfer_sync_write(self._peer, src, self._dst[pages], sizes):
            raise SystemExit("Mooncake: a write failed")

    def finish(self) -> None:
        pass

    def progress(self) -> None:
        pass

    def count(self) -> int:
        return 1 << 30


def as_target(arguments: argparse.Namespace) -> None:
    """Count, then compare."""
    line = Line(socket.socket(fileno=arguments.fd))
    _memory, pool = map_pool(arguments.target_fd, arguments.pool_bytes)
    peer = KINDS[arguments.peer]("target", pool, line, arguments.progress_thread)
    while True:
        line.receive()  # asleep between cells
        while line.poll() is None:
            peer.count()  # without a thread, that is what lets the writer connect
        line.send("ready")
        seen = 0
        end = None
        until = time.monotonic() + _TIMEOUT_S
        while end is None or seen < end["batches"]:
            seen += peer.count()
            end = end or line.poll()
            if arguments.progress_thread:
                os.sched_yield()
            if time.monotonic() > until:
                os._exit(1)
        line.send("counted")
        line.send(count_wrong(pool, Cell(**end["cell"]), end["pages"]))


def as_writer(arguments: argparse.Namespace) -> None:
    """Answer each line with what was measured."""
    ours, theirs = socket.socketpair()
    argv = [sys.executable, *sys.argv, "--fd", str(theirs.fileno())]
    fds = [theirs.fileno(), arguments.target_fd]
    subprocess.Popen(argv, pass_fds=fds, stdin=subprocess.DEVNULL)
    theirs.close()
    line = Line(ours)
    _memory, pool = map_pool(arguments.source_fd, arguments.pool_bytes)
    peer = KINDS[arguments.peer]("writer", pool, line, arguments.progress_thread)
    for text in sys.stdin:
        cell = Cell(**json.loads(text))
        fill(pool, cell)
        line.send("prepare")
        peer.prepare(cell)
        line.send("begin")
        await_answer(line, peer)
        batches = slices_of(cell)
        pages = count = 0
        begun = time.perf_counter()
        while count < 2 or time.perf_counter() - begun < cell.seconds:
            batch = next(batches)
            peer.write(batch)
            pages += batch.stop - batch.start
            count += 1
        line.send({"batches": count, "pages": pages, "cell": json.loads(text)})
        await_answer(line, peer)
        seconds = time.perf_counter() - begun
        bad = await_answer(line, peer)
        peer.finish()
        answer = {"pages": pages, "seconds": seconds, "bad": bad}
        os.write(ANSWERS, json.dumps(answer).encode() + b"\n")


def await_answer(line: Line, peer: Nixl | Mooncake) -> Any:
    """The target's next message, while this side goes on making progress."""
    until = time.monotonic() + _TIMEOUT_S
    while (message := line.poll()) is None:
        peer.progress()
        if time.monotonic() > until:
            raise SystemExit("the target does not answer")
    return message


KINDS: dict[str, type[Nixl] | type[Mooncake]] = {"nixl": Nixl, "mooncake": Mooncake}
#: The peers' own lines go to stderr.
ANSWERS = -1


def main() -> None:
    """See the module's docstring."""
    global ANSWERS
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=KINDS)
    parser.add_argument("--pool-bytes", type=int, required=True)
    parser.add_argument("--no-progress-thread", dest="progress_thread", action="store_false")
    parser.add_argument("--source-fd", type=int, required=True)
    parser.add_argument("--target-fd", type=int, required=True)
    parser.add_argument("--fd", type=int)
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    ANSWERS = os.dup(1)
    os.dup2(2, 1)
    (as_writer if arguments.fd is None else as_target)(arguments)
    sys.stderr.flush()
    os._exit(0)  # NIXL 1.5.1 can crash when the interpreter takes it down


if __name__ == "__main__":
    main()
