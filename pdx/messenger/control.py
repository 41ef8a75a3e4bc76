"""The control link's socket: framed messages over one TCP connection, bounded in both directions.

Runs on the primary's event loop. Knows addresses and frames, nothing of transfers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass

from pdx.errors import ConfigError, FabricError, PeerLost
from pdx.host.addresses import host_addresses
from pdx.host.route import route_to
from pdx.messenger.messages import MAX_CONTROL_FRAME_BYTES, ControlMessage
from pdx.request.frames import encode_frame, frame_decoder, read_frame

__all__ = [
    "Address",
    "ControlConnection",
    "connect",
    "parse_address",
    "reachable",
]

#: A peer that does not read its messages is lost, not waited for.
_MAX_UNSENT_BYTES = 64 << 20
#: For each wildcard an address that only a default route leads to. Nothing is sent there.
_DISTANT = {"0.0.0.0": "198.51.100.1", "::": "2001:db8::1"}
_decoder = frame_decoder(ControlMessage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A host (name or address, without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, default_host: str = "127.0.0.1") -> Address:
    """Parse ``host:port``, ``[v6]:port``, ``:port`` or a bare port.

    Raises:
        ConfigError: naming the text and the forms that work.
    """
    host, separator, port = text.rpartition(":")
    if not separator:
        host, port = "", text
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(
            f"{text!r} is not an address", hint=f"write IPv6 addresses in brackets: [{host}]:{port}"
        )
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(
            f"{text!r} is not an address",
            hint="use HOST:PORT, [IPV6]:PORT or :PORT, with a port from 0 to 65535",
        )
    return Address(host=host or default_host, port=int(port))


def reachable(bound: Address) -> list[Address]:
    """What peers connect to: the address itself. Of a wildcard, this host's addresses that other
    hosts may reach, the one of the default route first; loopback where there is no such address.
    """
    if bound.host not in _DISTANT:
        return [bound]
    version = 6 if bound.host == "::" else 4
    hosts = [each for each in host_addresses() if each.address.version == version]
    outer = [str(each.address) for each in hosts if each.reaches_out]
    try:
        usual = route_to(_DISTANT[bound.host]).local_address
    except FabricError:  # no default route
        usual = ""
    outer.sort(key=lambda host: host != usual)
    loopback = "::1" if version == 6 else "127.0.0.1"
    return [Address(host=host, port=bound.port) for host in outer or [loopback]]


class ControlConnection:
    """One connection. Whoever owns it calls :meth:`receive` in a single task and :meth:`close`
    once.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        #: The first bytes of the next frame, where they were read already.
        self._header: bytes | None = None
        #: Why we have dropped it, if we have.
        self._dropped: str | None = None
        #: We read no more of it.
        self.has_hung_up = False
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = writer.get_extra_info("peername")
        self.peer = str(Address(host=peer[0], port=peer[1]))
        self.peer_host: str = peer[0]
        #: Our own address on this connection: one that the peer can reach.
        self.local_host: str = writer.get_extra_info("sockname")[0]

    def send(self, message: ControlMessage) -> None:
        """Queue a message; never blocks.

        Raises:
            PeerLost: the peer has not read for too long.
        """
        transport = self._writer.transport
        if transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            raise PeerLost(f"{self.peer} does not read its control messages", peer=self.peer)
        if not transport.is_closing():
            self._writer.write(encode_frame(message))

    async def receive(self, max_bytes: int = MAX_CONTROL_FRAME_BYTES) -> ControlMessage:
        """The next message.

        Raises:
            PeerLost: the connection ended.
            ProtocolError: the peer sent what is no message.
        """
        try:
            header, self._header = self._header, None
            message: ControlMessage = await read_frame(self._reader, _decoder, max_bytes, header)
        except (asyncio.IncompleteReadError, OSError) as error:
            ended = str(error) if isinstance(error, OSError) else "it closed the connection"
            detail = self._dropped or ended
            raise PeerLost(f"{self.peer}: {detail}", peer=self.peer) from error
        return message

    async def first_bytes(self, timeout_s: float) -> bytes:
        """The first four bytes that the peer sends; a :meth:`receive` after this has them too.

        Raises:
            PeerLost: they do not come.
        """
        try:
            async with asyncio.timeout(timeout_s):
                self._header = await self._reader.readexactly(4)
        except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            detail = self._dropped or "it said nothing"
            raise PeerLost(f"{self.peer}: {detail}", peer=self.peer) from error
        return self._header

    def drop(self, reason: str) -> None:
        """Close at once, without a word; whoever waits for the peer hears the reason."""
        # Not by an exception that the reader keeps: its traceback would keep the reader, and all
        # that the peer has sent, until a collection of garbage.
        self._dropped = reason
        self._writer.transport.abort()

    def hang_up(self) -> None:
        """End a :meth:`receive` that waits, and every later one: a peer that hangs sends no end."""
        self.has_hung_up = True
        self._reader.set_exception(PeerLost(f"{self.peer}: we have hung up", peer=self.peer))

    async def close(self) -> None:
        """Flush what is queued (for a second at most) and close."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        # A peer that reads nothing holds up what is queued, and with it the end of the socket.
        self._writer.transport.abort()


async def connect(address: Address, *, timeout_s: float) -> ControlConnection:
    """Open a connection; tries every address that the host's name has.

    Raises:
        PeerLost: nobody answers there, with what was tried.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                address.host, address.port, happy_eyeballs_delay=0.25
            )
    except TimeoutError as error:
        raise PeerLost(f"{address}: no answer in {timeout_s:g} s", peer=str(address)) from error
    except OSError as error:
        raise PeerLost(f"{address}: {error.strerror or error}", peer=str(address)) from error
    return ControlConnection(reader, writer)
