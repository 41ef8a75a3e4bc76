"""One side of a fabric under test, in this process or in a child that can be killed and stopped.

``Side`` owns a fabric and a block of memory; ``RemoteSide`` has the same methods and runs them in
a child (shm joins two processes only, and a fault should hit one). As a script it is the child.
"""

from __future__ import annotations

import atexit
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

if __name__ == "__main__":  # a child: the tests' own modules are found from the checkout
    sys.path.insert(0, str(Path(__file__).parents[2]))

from pdx.errors import FabricError
from pdx.fabric import FabricEvent, FabricOptions, MemoryPart, PageBatch, Provider, open_fabric
from tests.fabric.batches import dense

__all__ = ["Child", "RemoteSide", "Side", "assert_serves", "join"]

_LENGTH = struct.Struct("<Q")
_WAIT_S = 10.0


class Side:
    """A fabric, ``num_bytes`` of memory registered in it, and one progress word."""

    def __init__(
        self,
        provider: Provider,
        num_bytes: int,
        options: FabricOptions | None = None,
        bind_host: str | Sequence[str] | None = None,
    ) -> None:
        self._map = mmap.mmap(-1, num_bytes)
        self.memory = np.frombuffer(self._map, np.uint8)
        self.word = np.zeros(1, np.uint64)
        self.fabric = open_fabric(provider=provider, bind_host=bind_host, options=options)
        self.region = self.fabric.register(self.memory.ctypes.data, num_bytes)
        self._seen: list[FabricEvent] = []

    def register_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        """From here on links are of a region of these parts (offset, bytes) of the memory."""
        address = self.memory.ctypes.data
        self.region = self.fabric.register_parts(
            [MemoryPart(address=address + start, num_bytes=length) for start, length in spans]
        )

    def open_link(self, **arguments: Any) -> tuple[int, bytes]:
        link = self.fabric.open_link(self.region, **arguments)
        return link, self.fabric.descriptor(link)

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """A method of the fabric."""
        return getattr(self.fabric, name)(*arguments, **named)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A function of a test module, on this side and in its process."""
        return function(self, *arguments)

    @property
    def word_address(self) -> int:
        return int(self.word.ctypes.data)

    def arm(self, transfer: int, batch: PageBatch, first_value: int) -> None:
        """Arm a batch on this side's own progress word."""
        self.fabric.arm(transfer, batch, word_address=self.word_address, first_value=first_value)

    def progress(self, value: int) -> None:
        self.word[0] = value

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.memory[:] = rng.integers(1, 255, len(self.memory), dtype=np.uint8)

    def zero(self) -> None:
        self.memory[:] = 0

    def read(self, offset: int = 0, num_bytes: int | None = None) -> bytes:
        end = len(self.memory) if num_bytes is None else offset + num_bytes
        return self.memory[offset:end].tobytes()

    def num_set(self) -> int:
        """Bytes that are not zero."""
        return int(np.count_nonzero(self.memory))

    def wait(self, kind: str, *, timeout_s: float = _WAIT_S, **fields: Any) -> Any:
        """The first event of this kind and these fields that no wait has taken yet."""
        deadline = time.monotonic() + timeout_s
        poller = select.poll()  # select() ends at descriptor 1023
        poller.register(self.fabric, select.POLLIN)
        while True:
            for event in self._seen:
                matches = type(event).__name__ == kind and all(
                    getattr(event, name) == value for name, value in fields.items()
                )
                if matches:
                    self._seen.remove(event)
                    return event
            left = deadline - time.monotonic()
            if left <= 0:
                state = f"seen {self._seen}, {self.fabric.statistics()}"
                raise TimeoutError(f"no {kind} {fields} in {timeout_s} s; {state}")
            poller.poll(left * 1000)
            self._seen += self.fabric.events()

    def wait_set(self, offset: int) -> None:
        """Until the byte at ``offset`` is not zero."""
        deadline = time.monotonic() + _WAIT_S
        while self.memory[offset] == 0:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing landed at {offset}")
            time.sleep(0.0002)

    def wait_count(self, slot: int, generation: int, atoms: int) -> None:
        """Until a slot has counted this much."""
        self._wait_for(lambda: self.fabric.count(slot, generation) >= atoms)

    def wait_statistic(self, name: str, at_least: int) -> int:
        """Until a counter has this value."""
        self._wait_for(lambda: getattr(self.fabric.statistics(), name) >= at_least)
        return int(getattr(self.fabric.statistics(), name))

    def _wait_for(self, condition: Any) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.fabric.statistics()}")
            time.sleep(0.001)

    def pending(self) -> list[FabricEvent]:
        """Events that no wait has taken."""
        self._seen += self.fabric.events()
        return list(self._seen)

    def statistics(self) -> Any:
        return self.fabric.statistics()

    def domain_statistics(self) -> Any:
        return self.fabric.domain_statistics()

    def cpu_s(self) -> float:
        """Processor time of this process so far."""
        times = os.times()
        return times.user + times.system

    def close(self) -> None:
        self.fabric.close()


class Child:
    """A process that serves one Side after another.

    Args:
        prefix: a command that becomes the one that follows it.
    """

    #: Started and without a Side: a start costs a third of a second.
    idle: ClassVar[list[Child]] = []

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(60)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def end(self) -> None:
        """It ends when its socket does; one that was stopped or hangs is killed."""
        self.socket.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@atexit.register
def _end_idle() -> None:
    while Child.idle:
        Child.idle.pop().end()


class RemoteSide:
    """A Side in a child process; every method of Side works here.

    Args:
        child: the process, which then ends with the side.
    """

    def __init__(self, *arguments: Any, child: Child | None = None, **named: Any) -> None:
        self._shared = child is None
        self._child = child or (Child.idle.pop() if Child.idle else Child())
        self.pid = self._child.process.pid
        self.killed = False
        self._ask("__init__", arguments, named)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: self._ask(name, arguments, named)

    def kill(self) -> None:
        self.killed = True
        self._child.process.kill()
        self._child.end()

    def stop(self) -> None:
        """Return when all its threads stand still."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        if self.killed:
            return
        self.resume()
        self._ask("close", (), {})
        if self._shared:
            Child.idle.append(self._child)
        else:
            self._child.end()

    def _ask(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        try:
            _send(self._child.socket, (name, arguments, named))
            error, result = _receive(self._child.socket)
        except BaseException:  # hung, gone, or the test ran out of time: nothing more can be asked
            self.kill()
            raise
        if error is not None:
            raise error
        return result


def join(a: Side | RemoteSide, b: Side | RemoteSide, **arguments: Any) -> tuple[int, int]:
    """A link between two sides, up on both."""
    link_a, descriptor_a = a.open_link(**arguments)
    link_b, descriptor_b = b.open_link(**arguments)
    a.call("connect", link_a, descriptor_b)
    b.call("connect", link_b, descriptor_a)
    a.wait("LinkUp", link=link_a)
    b.wait("LinkUp", link=link_b)
    return link_a, link_b


def assert_serves(here: Side | RemoteSide, there: Side | RemoteSide) -> None:
    """A new link between the two carries a page."""
    link, peer_link = join(here, there)
    there.call("expect", peer_link, 9, 9, 1)
    transfer = here.call("open_transfer", link, 9, 9)
    here.call("write", transfer, dense([0], [1], 4096, 1, 4))
    here.call("seal", transfer)
    there.wait("Arrived", link=peer_link)
    here.wait("TransferDone", transfer=transfer)
    assert there.read(4096, 4096) == here.read(0, 4096)
    there.call("release", 9, 9)


def _send(sock: socket.socket, message: Any) -> None:
    body = pickle.dumps(message)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def _receive(sock: socket.socket) -> Any:
    length = _LENGTH.unpack(_exactly(sock, _LENGTH.size))[0]
    return pickle.loads(_exactly(sock, length))


def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = sock.recv(min(num_bytes, 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _serve(sock: socket.socket) -> None:
    side: Side | None = None
    while True:
        try:
            name, arguments, named = _receive(sock)
        except EOFError:
            return
        try:
            if name == "__init__":
                side, result = Side(*arguments, **named), None
            else:
                result = getattr(side, name)(*arguments, **named)
            _send(sock, (None, result))
        except (FabricError, TimeoutError, ValueError) as error:
            _send(sock, (error, None))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
