"""The control links of a simulated room: TCP connections between processes, with what TCP does to
them.

A connection carries bytes both ways, in order, each way with delays of its own; connections
overtake each other. What is on its way over a cut path waits until it is mended, as TCP would send
it again. A process that dies takes its connections along: the peer hears of it after what was
sent before, or instead of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, cast

from pdx.lab.sim.loop import Process, VirtualLoop

__all__ = ["ControlNetwork", "Listener", "Transport"]

_SYN_AGAIN_S = 0.2


class Listener:
    """What a node is given as its listening socket."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port

    def getsockname(self) -> tuple[str, int]:
        return self.host, self.port

    def listen(self, backlog: int) -> None:
        """It listens from the start."""


class _Socket:
    """What a connection shows as its socket."""

    def setsockopt(self, *_: Any) -> None:
        """Nothing is to be set."""


class _Server:
    """What create_server() returns."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close


class Transport:
    """One end of a connection."""

    def __init__(
        self,
        network: ControlNetwork,
        process: Process,
        protocol: Any,
        own: tuple[str, int],
        peer: tuple[str, int],
    ) -> None:
        self.process = process
        self.peer: Transport | None = None
        #: Bytes for this end that wait for a cut path.
        self.held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._network = network
        self._protocol = protocol
        self._extra = {"socket": _Socket(), "peername": peer, "sockname": own}
        self._made = False
        self._closing = False
        self._lost = False
        #: When the last of what is on its way to this end arrives.
        self.arrives_ns = 0
        self._unread: list[bytes] | None = None

    # ---- what asyncio's streams ask of a transport ----------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._extra.get(name, default)

    def is_closing(self) -> bool:
        return self._closing or self.process.dead or self._network.is_over

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        """Send bytes, if the connection is still there."""
        if self.is_closing() or self.peer is None:
            return
        self._network.sent(self, data)
        self._network.carry(self, self.peer.receive, bytes(data))

    def close(self) -> None:
        """Send what was written, then the end."""
        if not self._closing:
            self._closing = True
            if self.peer is not None:
                self._network.carry(self, self.peer.receive, b"")
            self._network.soon(self, self.lose, None)

    def abort(self) -> None:
        """Forget what was not sent."""
        if not self._lost:
            self._closing = True
            if self.peer is not None:
                self._network.reset_end(self.peer)
            self._network.soon(self, self.lose, None)

    def pause_reading(self) -> None:
        """The reader has enough for now."""
        if self._unread is None:
            self._unread = []

    def resume_reading(self) -> None:
        """The reader wants more."""
        unread, self._unread = self._unread or [], None
        for data in unread:
            self.receive(data)

    # ---- the network's side ---------------------------------------------------------------

    def make(self) -> None:
        """The connection is made, if it was not reset before."""
        if not self._lost:
            self._made = True
            self._protocol.connection_made(self)

    def receive(self, data: bytes) -> None:
        """Bytes of the peer arrive; none: it has closed."""
        if self._lost and data and self.peer is not None:
            self._network.reset_end(self.peer)  # it writes to nobody
        if self._lost or self._closing:
            return
        if self._unread is not None:
            self._unread.append(data)
        elif data:
            self._protocol.data_received(data)
        elif not self._protocol.eof_received():
            self.close()

    def lose(self, error: Exception | None) -> None:
        """The connection is over."""
        if not self._lost:
            self._closing = self._lost = True
            self._network.forget(self)
            if self._made:
                self._protocol.connection_lost(error)

    @property
    def is_over(self) -> bool:
        """This end is lost."""
        return self._lost


class ControlNetwork:
    """All control connections of a room.

    Args:
        delay_ns: from sending until receiving, drawn for each piece.
        sent: told of each piece that is sent: from, to, bytes.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        *,
        delay_ns: tuple[int, int],
        sent: Callable[[str, str, bytes], None] | None = None,
    ) -> None:
        self.delay_ns = delay_ns
        #: The room is disposed of; all connections are closed.
        self.is_over = False
        self._loop = loop
        self._rng = rng
        self._on_sent = sent
        self._listeners: dict[tuple[str, int], tuple[Process, Callable[[], Any]]] = {}
        #: Living ends, in the order in which they were made.
        self._ends: dict[Transport, None] = {}
        self._cut: set[tuple[str, str]] = set()
        self._slowness: dict[tuple[str, str], float] = {}
        self._next_port = 40_000

    # ---- for the loop ---------------------------------------------------------------------

    def listen(self, process: Process, factory: Callable[[], Any], sock: Any) -> _Server:
        """Take connections to an address."""
        address = sock.getsockname()
        self._listeners[address] = (process, factory)

        def close() -> None:
            if self._listeners.get(address, (None,))[0] is process:
                del self._listeners[address]

        return _Server(close)

    async def connect(
        self, process: Process, factory: Callable[[], Any], host: str, port: int
    ) -> tuple[Transport, Any]:
        """A connection from a process to an address.

        Raises:
            OSError: nobody listens there.
        """
        await asyncio.sleep(self._draw_ns(1.0) * 1e-9)
        while True:
            server, make_server = self._listeners.get((host, port), (None, None))
            if server is None or (process.name, server.name) not in self._cut:
                break
            await asyncio.sleep(_SYN_AGAIN_S)
        if server is None or server.dead or make_server is None:
            raise ConnectionRefusedError(111, "Connection refused")
        self._next_port += 1
        own, protocol, server_protocol = (process.host, self._next_port), factory(), make_server()
        ours = Transport(self, process, protocol, own, (host, port))
        theirs = Transport(self, server, server_protocol, (host, port), own)
        ours.peer, theirs.peer = theirs, ours
        self._ends[ours] = self._ends[theirs] = None
        ours.make()
        self.carry(ours, theirs.make)
        return ours, protocol

    # ---- for transports -------------------------------------------------------------------

    def sent(self, source: Transport, data: bytes) -> None:
        """Bytes go on their way."""
        if self._on_sent is not None and source.peer is not None:
            self._on_sent(source.process.name, source.peer.process.name, data)

    def carry(self, source: Transport, receive: Callable[..., None], *args: Any) -> None:
        """Do something at the peer after the delay of the path, after all that was sent before."""
        target = source.peer
        assert target is not None
        path = (source.process.name, target.process.name)
        delay_ns = self._draw_ns(self._slowness.get(path, 1.0))
        target.arrives_ns = max(target.arrives_ns + 1, self._loop.now_ns + delay_ns)
        self._loop.call_at_ns(target.arrives_ns, self._arrive, source, receive, args)

    def _arrive(self, source: Transport, receive: Callable[..., None], args: Any) -> None:
        target = cast(Transport, source.peer)
        if target.held or (source.process.name, target.process.name) in self._cut:
            target.held.append((receive, args))
        else:
            self._loop.call_at_ns(self._loop.now_ns, receive, *args, process=target.process)

    def soon(self, end: Transport, callback: Callable[..., None], *args: Any) -> None:
        """Do something at this end."""
        self._loop.call_at_ns(self._loop.now_ns, callback, *args, process=end.process)

    def forget(self, end: Transport) -> None:
        """An end is lost."""
        self._ends.pop(end, None)

    def reset_end(self, end: Transport) -> None:
        """A reset comes to this end, which overtakes what was sent."""
        error = ConnectionResetError(104, "Connection reset by peer")
        when_ns = self._loop.now_ns + self._draw_ns(1.0)
        self._loop.call_at_ns(when_ns, end.lose, error, process=end.process)

    # ---- faults ---------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """The process has died: its peers hear an end or a reset, if the path lets it through."""
        self._listeners = {
            address: entry for address, entry in self._listeners.items() if entry[0] is not process
        }
        for end in list(self._ends):
            if end.process is not process:
                continue
            self.forget(end)
            peer = end.peer
            if peer is None or peer.is_over:
                continue
            if self._rng.random() < 0.5:
                self.carry(end, peer.receive, b"")
            else:
                error = ConnectionResetError(104, "Connection reset by peer")
                self.carry(end, peer.lose, error)

    def hang_up(self, one: str, other: str, *, half: bool) -> None:
        """The connections between two nodes are reset; ``half``: only one end hears of it."""
        for end in list(self._ends):
            if end.peer is None or (end.process.name, end.peer.process.name) != (one, other):
                continue
            self.reset_end(end)
            if not half:
                self.reset_end(end.peer)

    def cut(self, source: str, target: str) -> None:
        """Nothing gets from source to target until mend()."""
        self._cut.add((source, target))

    def mend(self, one: str, other: str) -> None:
        """The end of a cut: what waited goes on."""
        for path in ((one, other), (other, one)):
            self._cut.discard(path)
            for end in list(self._ends):
                if end.peer is not None and (end.peer.process.name, end.process.name) == path:
                    held, end.held = end.held, []
                    # At once: what was sent later is on its way, and must not overtake.
                    for receive, args in held:
                        now_ns = self._loop.now_ns
                        self._loop.call_at_ns(now_ns, receive, *args, process=end.process)

    def slow(self, source: str, target: str, slowness: float) -> None:
        """Multiply the delays of a path; 1 is normal."""
        self._slowness[source, target] = slowness

    def _draw_ns(self, slowness: float) -> int:
        low, high = self.delay_ns
        return int((low + self._rng.random() * (high - low)) * slowness)
