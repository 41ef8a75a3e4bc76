"""Between the two processes of `pdx bench transfer`: lines of JSON on one connection, blocking."""

from __future__ import annotations

import socket
from typing import TypeVar

import msgspec

from pdx.errors import PeerLost, ProtocolError
from pdx.fabric.interface import Provider
from pdx.lab.transfers.pattern import Cell

__all__ = [
    "BENCH_VERSION",
    "Begin",
    "Channel",
    "Counted",
    "Echo",
    "End",
    "Hello",
    "Ready",
    "Verified",
    "peer_name",
]

#: Both sides must be of the same.
BENCH_VERSION = 1
_MAX_LINE_BYTES = 1 << 16
_ANSWER_S = 60.0


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First, from both sides; the receiver answers with what it was asked for."""

    version: int = BENCH_VERSION
    provider: Provider
    pool_bytes: int
    descriptor: bytes


class Begin(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """To the receiver: count what comes with this generation."""

    cell: Cell
    generation: int


class Echo(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """To the receiver: answer each page of this size with one of your own."""

    page_bytes: int
    count: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From the receiver: it counts, or it echoes."""


class End(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """To the receiver: so many atoms were written, of so many pages."""

    atoms: int
    pages: int


class Counted(msgspec.Struct, frozen=True, tag=True):
    """From the receiver: all of them have arrived."""


class Verified(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """From the receiver, after a look at every byte."""

    wrong: int


Message = Hello | Begin | Echo | Ready | End | Counted | Verified
_M = TypeVar("_M", Hello, Begin, Echo, Ready, End, Counted, Verified)


class Channel:
    """One side's end of the connection, which it closes."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.settimeout(_ANSWER_S)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._decoder = msgspec.json.Decoder(Message)

    def fileno(self) -> int:
        """To wait for the next message."""
        return self._connection.fileno()

    def receive_at_leisure(self) -> Message | None:
        """The next message, however long the other side does something else."""
        self._connection.settimeout(None)
        try:
            return self.receive()
        finally:
            self._connection.settimeout(_ANSWER_S)

    def send(self, message: Message) -> None:
        """Give a message to the other side."""
        try:
            self._connection.sendall(msgspec.json.encode(message) + b"\n")
        except OSError as error:
            raise PeerLost(f"{self.peer} is gone: {error}") from error

    def receive(self) -> Message | None:
        """The next message; None: the other side has ended."""
        try:
            line = self._lines.readline(_MAX_LINE_BYTES)
        except TimeoutError as error:
            raise PeerLost(f"{self.peer} has not answered for {_ANSWER_S:g} s") from error
        except OSError as error:
            raise PeerLost(f"{self.peer} is gone: {error}") from error
        if not line:
            return None
        try:
            return self._decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self.peer} sent no message of this bench: {error}") from error

    def expect(self, kind: type[_M]) -> _M:
        """The next message, which must be of this kind."""
        message = self.receive()
        if message is None:
            raise PeerLost(f"{self.peer} has ended the connection")
        if not isinstance(message, kind):
            raise ProtocolError(f"{self.peer} sent {type(message).__name__}, not {kind.__name__}")
        return message

    def close(self) -> None:
        """End the connection."""
        self._lines.close()
        self._connection.close()


def peer_name(host: str, port: int) -> str:
    """The address as users write it: IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
