"""What connections cost that do not say who they are, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdx.errors import PeerLost
from pdx.messenger.control import Address, ControlConnection
from pdx.messenger.listener import ControlListener

MAX_STRANGERS = 8
HELLO = b"open"


class Port:
    """A listener that knows who says hello, and echoes what they say then."""

    def __init__(self, handshake_s: float) -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        self.listener = ControlListener(
            sock, self._serve, max_strangers=MAX_STRANGERS, handshake_s=handshake_s
        )
        self.address = Address(host="", port=0)
        self.most_strangers = 0
        self.reasons: list[str] = []

    async def _serve(
        self,
        connection: ControlConnection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.most_strangers = max(self.most_strangers, self.listener.num_strangers)
        try:
            assert await connection.first_bytes(60.0) == HELLO
            self.listener.known(connection)
            while data := await reader.read(100):
                writer.write(data)
        except PeerLost as error:
            self.reasons.append(error.message)
        finally:
            await connection.close()


@contextlib.asynccontextmanager
async def port(handshake_s: float = 60.0) -> AsyncIterator[Port]:
    opened = Port(handshake_s)
    [opened.address] = await opened.listener.listen()
    try:
        yield opened
    finally:
        opened.listener.close()
        await opened.listener.end()


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def peer(there: Port) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that says hello, and is answered."""
    reader, writer = await asyncio.open_connection(there.address.host, there.address.port)
    writer.write(HELLO)
    await echo(reader, writer)
    return reader, writer


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"ping")
    assert await reader.readexactly(4) == b"ping"


async def test_a_peer_gets_in_and_stays_however_many_strangers_say_nothing() -> None:
    async with port() as there, contextlib.AsyncExitStack() as stack:
        first = await peer(there)
        strangers = []
        for _ in range(5):
            for _ in range(3 * MAX_STRANGERS):
                ends = await asyncio.open_connection(there.address.host, there.address.port)
                stack.callback(ends[1].close)
                strangers.append(ends[0])
            second = await peer(there)
            await echo(*second)
            second[1].close()
        for reader in strangers[:-MAX_STRANGERS]:  # the oldest have given their places
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        await echo(*first)
        first[1].close()
        assert there.most_strangers == MAX_STRANGERS
        assert "have not said who they are" in there.reasons[0]


async def test_a_burst_of_strangers_takes_no_more_descriptors_than_places() -> None:
    """They have all connected before any of them is looked at."""
    async with port() as there, contextlib.AsyncExitStack() as stack:
        address = (there.address.host, there.address.port)
        for _ in range(8 * MAX_STRANGERS):
            stack.enter_context(socket.create_connection(address))
        before = num_descriptors()
        most = before
        while len(there.reasons) < 7 * MAX_STRANGERS:
            await asyncio.sleep(0)
            most = max(most, num_descriptors())
        assert most - before < 2 * MAX_STRANGERS


async def test_a_stranger_is_closed_after_its_time_and_a_peer_is_not() -> None:
    async with port(handshake_s=0.05) as there:
        reader, writer = await peer(there)
        stranger, its_writer = await asyncio.open_connection(there.address.host, there.address.port)
        its_writer.write(HELLO[:3])
        with contextlib.suppress(ConnectionResetError):
            assert await stranger.read() == b""
        its_writer.close()
        await echo(reader, writer)
        writer.close()
        assert there.listener.num_strangers == 0
        assert "not said who it is in time" in there.reasons[0]


async def test_the_end_of_the_listener_ends_its_connections() -> None:
    async with port() as there:
        reader, writer = await peer(there)
    assert await reader.read() == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(there.address.host, there.address.port)
