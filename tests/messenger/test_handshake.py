"""The handshake and the end of a link, both sides of it over real sockets and a real data path."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from pdx.errors import CapacityError, PeerError, PeerLost, PeerRefused, ProtocolError, RequestError
from pdx.fabric import FabricOptions
from pdx.kv.pages import Proof
from pdx.messenger.actions import PrefillTimes
from pdx.messenger.control import Address, ControlConnection, connect
from pdx.messenger.decode_link import Arrival, DecodeLink
from pdx.messenger.decode_side import TransferTimeouts
from pdx.messenger.fabric_hub import FabricHub, MappedMemory
from pdx.messenger.handshake import FabricChoice, NodeIdentity, describe, greet, welcome
from pdx.messenger.manifest import Manifest
from pdx.messenger.messages import (
    PROTOCOL_VERSION,
    Cancel,
    ControlMessage,
    Describe,
    Description,
    Draining,
    Hello,
    Posted,
    Prefill,
    Refuse,
    Welcome,
)
from pdx.messenger.prefill_link import PrefillLink
from pdx.messenger.slots import SlotTable
from pdx.request.batch import ScoredToken
from pdx.request.ids import IdArray

MANIFEST = Manifest(
    weights_id="w",
    text_id="t",
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    dtype="float32",
    page_size=16,
    tp_size=1,
    kv_layout="head-major",
    num_pages=4,
)
DESCRIPTION = Description(model="m", dtype="float32", page_size=16)
SECRET = b"correct horse battery staple"
STEP_S = 10.0


def identity(
    node: str, fabric: FabricChoice = "tcp", secret: bytes | None = None, **changes: object
) -> NodeIdentity:
    manifest = msgspec.structs.replace(MANIFEST, **changes)
    return NodeIdentity(node=node, manifest=manifest, fabric=fabric, secret=secret)


@contextlib.contextmanager
def hub() -> contextlib.ExitStack:
    layout = MANIFEST.layout()
    size = layout.total_bytes
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    eventfd = os.eventfd(0)
    mapped = MappedMemory(
        kv_address=address,
        kv_bytes=size,
        progress_addresses=(address + size,),
        progress_eventfds=(eventfd,),
    )
    opened = FabricHub(mapped, FabricOptions())
    try:
        yield opened
    finally:
        opened.close()
        os.close(eventfd)


@dataclass
class DecodeEngine:
    """What a decoder's link tells its engine."""

    settled: list[tuple[int, Proof]] = field(default_factory=list)
    lost: list[RequestError] = field(default_factory=list)
    was_settled: asyncio.Event = field(default_factory=asyncio.Event)

    def transfer_settled(self, link: DecodeLink, transfer_id: int, proof: Proof) -> None:
        self.settled.append((transfer_id, proof))
        self.was_settled.set()

    def transfer_lost(self, link: DecodeLink, transfer_id: int, error: RequestError) -> None:
        self.lost.append(error)

    def prefix_found(self, link: DecodeLink, transfer_id: int, num_tokens: int) -> None:
        pytest.fail("nothing is cached")

    def transfer_counted(self, link: DecodeLink, transfer_id: int, arrival: Arrival) -> None:
        pytest.fail("nothing is written")

    def transfer_ready(self, link: DecodeLink, transfer_id: int) -> None:
        pytest.fail("nothing is written")

    def prompt_scored(self, link: DecodeLink, transfer_id: int, tokens: list[ScoredToken]) -> None:
        pytest.fail("nothing is scored")

    def prefill_times(self, link: DecodeLink, times: PrefillTimes) -> None:
        pytest.fail("nothing is posted")


@dataclass
class PrefillEngine:
    """What a prefiller's link asks of its engine: it takes prompts, or not, and runs none."""

    takes: bool = True
    accepted: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    def accept(self, link: PrefillLink, prefill: Prefill) -> None:
        if not self.takes:
            raise CapacityError("no room")
        self.accepted.append(prefill.transfer_id)

    def drop(self, link: PrefillLink, transfer_id: int) -> None:
        self.dropped.append(transfer_id)

    def hold_source(self, link: PrefillLink, transfer_id: int) -> None:
        """Its first chunk is armed."""

    def release_source(self, link: PrefillLink, transfer_id: int, *, unproved: bool) -> None:
        """Its writes are over."""

    def link_over(self, link: PrefillLink) -> None:
        """The link is fenced."""


@dataclass
class Pair:
    """A decoder and a prefiller that have a link."""

    decode: DecodeLink
    prefill: PrefillLink
    decoder: DecodeEngine
    prefiller: PrefillEngine
    slots: SlotTable
    #: Of either side, for what no honest node sends.
    of_decoder: ControlConnection
    of_prefiller: ControlConnection

    def ask(self, transfer_id: int) -> None:
        pair = self.slots.take()
        assert pair is not None
        self.decode.start(
            Prefill(
                transfer_id=transfer_id,
                token_ids=IdArray([1] * 20),
                first_position=0,
                page_indices=IdArray([0, 1]),
                slot=pair[0],
                generation=pair[1],
                atoms_by_rank=[4],
            )
        )


@contextlib.asynccontextmanager
async def serving(
    serve: Callable[[ControlConnection], Awaitable[object]],
) -> AsyncIterator[Address]:
    """A server that treats each connection like this; errors of ours end the connection."""
    tasks = []

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        connection = ControlConnection(reader, writer)
        with contextlib.suppress(PeerError):
            await serve(connection)
        await connection.close()

    async with await asyncio.start_server(on_connection, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield Address(host=host, port=port)
        await asyncio.gather(*tasks)


async def greeted(
    address: Address,
    decode_hub: FabricHub,
    who: NodeIdentity,
    engine: DecodeEngine,
    slots: SlotTable,
    timeout_s: float = STEP_S,
) -> tuple[DecodeLink, ControlConnection]:
    """A decoder's link, as its node makes it."""
    connection = await connect(address, timeout_s=STEP_S)
    link = DecodeLink(
        connection=connection,
        hub=decode_hub,
        slots=slots,
        owner=engine,
        timeouts=TransferTimeouts(),
    )
    try:
        await greet(link, connection, decode_hub, who, timeout_s=timeout_s)
    except BaseException as error:
        link.end(str(error))
        await link.over.wait()
        await connection.close()
        raise
    return link, connection


@contextlib.asynccontextmanager
async def pair(
    decoder: NodeIdentity, prefiller: NodeIdentity, *, takes: bool = True
) -> AsyncIterator[Pair]:
    decode_engine, prefill_engine, slots = DecodeEngine(), PrefillEngine(takes), SlotTable()
    made: asyncio.Future[tuple[PrefillLink, ControlConnection]]
    made = asyncio.get_running_loop().create_future()
    with hub() as decode_hub, hub() as prefill_hub:

        async def serve(connection: ControlConnection) -> None:
            def make_link(hello: Hello) -> PrefillLink:
                return PrefillLink(
                    connection=connection,
                    hello=hello,
                    hub=prefill_hub,
                    layout=MANIFEST.layout(),
                    owner=prefill_engine,
                )

            link = await welcome(connection, prefiller, DESCRIPTION, 64, make_link)
            if link is not None:
                made.set_result((link, connection))
                await link.run()

        async with serving(serve) as address:
            link, connection = await greeted(address, decode_hub, decoder, decode_engine, slots)
            serving_decoder = asyncio.create_task(link.run())
            prefill_link, other = await made
            yield Pair(link, prefill_link, decode_engine, prefill_engine, slots, connection, other)
            link.say_goodbye("the test is over")
            await serving_decoder


def both(**options: object) -> contextlib.AbstractAsyncContextManager[Pair]:
    return pair(identity("d"), identity("p"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_two_nodes_that_fit_make_a_link(secret: bytes | None) -> None:
    async with pair(identity("d", secret=secret), identity("p", "auto", secret)) as nodes:
        assert nodes.decode.usable and nodes.decode.same_host
        assert nodes.decode.provider == nodes.prefill.provider == "tcp"
        assert nodes.decode.max_prompt_len == 64
        assert nodes.prefill.node == "d"
    assert nodes.prefill.over.is_set()


@pytest.mark.parametrize(
    ("decoder", "prefiller", "reason"),
    [
        (identity("d", weights_id="x"), identity("p"), r"weights_id +w +x"),
        (identity("d", head_dim=16), identity("p"), "prefiller +decoder"),
        (identity("d", "shm"), identity("p", "tcp"), "no common data path"),
        (identity("d", "auto"), identity("p", "auto"), r"\(shm\) cannot be opened: .* our own"),
        (identity("d"), identity("p", secret=SECRET), "asks for a secret"),
        (identity("d", secret=SECRET), identity("p"), "has no secret"),
        (identity("d", secret=SECRET + b"!"), identity("p", secret=SECRET), "another secret"),
    ],
)
async def test_two_nodes_that_do_not_fit_are_told_why(
    decoder: NodeIdentity, prefiller: NodeIdentity, reason: str
) -> None:
    with pytest.raises(PeerRefused, match=reason):
        async with pair(decoder, prefiller):
            pytest.fail("they have a link")


async def test_d6_another_layout_of_pages_is_refused_by_name() -> None:
    with pytest.raises(PeerRefused, match=r"kv_layout +head-major +token-major"):
        async with pair(identity("d", kv_layout="token-major"), identity("p")):
            pytest.fail("they have a link")


async def answered(
    answer: Callable[[ControlConnection, Hello], ControlMessage], timeout_s: float = STEP_S
) -> None:
    """Greet a server that answers a Hello like this, and waits for our end."""

    async def serve(connection: ControlConnection) -> None:
        hello = await connection.receive()
        assert isinstance(hello, Hello)
        connection.send(answer(connection, hello))
        await connection.receive()

    with hub() as decode_hub:
        async with serving(serve) as address:
            await greeted(
                address, decode_hub, identity("d"), DecodeEngine(), SlotTable(), timeout_s
            )


def welcome_with(hello: Hello, provider: str, descriptor: bytes) -> Welcome:
    return Welcome(
        node="p",
        manifest=MANIFEST,
        host=hello.host,
        pid=1,
        provider=provider,
        descriptor=descriptor,
        max_prompt_len=64,
    )


async def test_an_answer_that_is_none_breaks_the_protocol() -> None:
    with pytest.raises(ProtocolError, match="answered Description"):
        await answered(lambda connection, hello: DESCRIPTION)
    with pytest.raises(ProtocolError, match="answered Welcome"):
        await answered(lambda connection, hello: welcome_with(hello, "efa", b""))


async def test_a_data_path_that_carries_nothing_is_no_link() -> None:
    """Its own descriptor as the peer's: nobody is there who writes back."""
    with hub() as nobodys:
        silent = nobodys.open_link("tcp", "127.0.0.1", lambda event: None)
        descriptor = silent.fabric.descriptor(silent.link)
        with pytest.raises(PeerLost, match=r"no write came through in 0\.3 s"):
            await answered(lambda _, hello: welcome_with(hello, "tcp", descriptor), 0.3)


async def opened_with(opening: ControlMessage) -> list[ControlMessage]:
    """What a prefiller answers to the first message of a connection, and how it ended."""
    outcome: list[object] = []
    with hub() as prefill_hub:

        async def serve(connection: ControlConnection) -> None:
            def make_link(hello: Hello) -> PrefillLink:
                return PrefillLink(
                    connection=connection,
                    hello=hello,
                    hub=prefill_hub,
                    layout=MANIFEST.layout(),
                    owner=PrefillEngine(),
                )

            try:
                outcome.append(await welcome(connection, identity("p"), DESCRIPTION, 64, make_link))
            except PeerError as error:
                outcome.append(error)

        async with serving(serve) as address:
            connection = await connect(address, timeout_s=STEP_S)
            connection.send(opening)
            with contextlib.suppress(PeerLost):
                outcome.append(await connection.receive())
            await connection.close()
    return outcome  # type: ignore[return-value]


HELLO = Hello(
    node="d",
    manifest=MANIFEST,
    host="elsewhere",
    pid=1,
    descriptors=[],
    nonce=b"n" * 32,
    protocol=PROTOCOL_VERSION,
)


async def test_a_prefiller_says_what_it_serves_and_nothing_more() -> None:
    outcome = await opened_with(Describe(nonce=b"n"))
    assert outcome == [None, DESCRIPTION]


async def test_whoever_begins_with_something_else_is_cut_off() -> None:
    [error] = await opened_with(Cancel(transfer_id=1))
    assert isinstance(error, ProtocolError) and "began with Cancel" in str(error)


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (
            msgspec.structs.replace(HELLO, protocol=PROTOCOL_VERSION - 1),
            f"protocol {PROTOCOL_VERSION - 1} of the decoder is not",
        ),
        (
            msgspec.structs.replace(HELLO, descriptors=[("shm", b"x")]),
            "shared memory does not reach, the hosts differ",
        ),
        (
            msgspec.structs.replace(HELLO, descriptors=[("tcp", b"x" * 64)]),
            r"the data path \(tcp\) cannot be opened",
        ),
    ],
)
async def test_an_opening_that_cannot_be_served_is_refused(hello: Hello, reason: str) -> None:
    ended, answer = await opened_with(hello)
    assert ended is None
    assert isinstance(answer, Refuse)
    assert re.search(reason, answer.reason)


async def test_a_prefiller_that_cannot_describe_itself_says_why() -> None:
    async def refuse(connection: ControlConnection) -> None:
        await connection.receive()
        connection.send(Refuse(reason="not now"))

    async with serving(refuse) as address:
        with pytest.raises(PeerRefused, match="not now"):
            await describe(address, timeout_s=STEP_S)


async def test_who_does_not_answer_in_time_is_lost() -> None:
    async def say_nothing(connection: ControlConnection) -> None:
        for _ in range(2):
            await connection.receive()

    async with serving(say_nothing) as address:
        with pytest.raises(PeerLost, match=r"no answer in 0\.05 s"):
            await describe(address, timeout_s=0.05)


async def test_who_answers_something_else_is_no_prefiller() -> None:
    async def answer(connection: ControlConnection) -> None:
        await connection.receive()
        connection.send(Draining())

    async with serving(answer) as address:
        with pytest.raises(ProtocolError, match="answered Draining"):
            await describe(address, timeout_s=STEP_S)


async def test_what_a_peer_may_not_send_ends_the_link_at_both() -> None:
    async with both() as nodes:
        nodes.of_prefiller.send(Cancel(transfer_id=1))
        await nodes.decode.over.wait()
        assert nodes.decode.end_reason == "a prefiller may not send Cancel"
        await nodes.prefill.over.wait()
    async with both() as nodes:
        nodes.of_decoder.send(Posted(transfer_id=1, atoms=1, prefill_start_ns=0, last_layer_ns=0))
        await nodes.prefill.over.wait()
        await nodes.decode.over.wait()


async def test_a_goodbye_ends_the_link_with_its_reason() -> None:
    async with both() as nodes:
        nodes.ask(1)
        nodes.decode.say_goodbye("it stops")
        nodes.decode.say_goodbye("it stops again")
        await nodes.decode.over.wait()
        assert nodes.decode.end_reason == "it stops"
        assert nodes.decoder.settled == [(1, Proof.FENCED)]
        assert "it stops" in nodes.decoder.lost[0].message
        assert nodes.decode.atoms_landed(1) == 0
        await nodes.prefill.over.wait()


async def test_a_draining_prefillers_link_ends_when_nothing_is_open() -> None:
    async with both() as nodes:
        nodes.ask(1)
        nodes.prefill.send(Draining())
        nodes.decode.cancel(1)
        await nodes.decode.over.wait()
        assert nodes.decode.end_reason == "the prefiller drains"
        assert nodes.decoder.settled == [(1, Proof.DRAINED)]
        assert nodes.prefiller.accepted == nodes.prefiller.dropped == [1]


async def test_what_an_engine_does_not_take_is_rejected_with_its_reason() -> None:
    async with both(takes=False) as nodes:
        nodes.ask(1)
        await nodes.decoder.was_settled.wait()
        assert nodes.decoder.settled == [(1, Proof.NOT_STARTED)]
        [error] = nodes.decoder.lost
        assert (error.message, error.http_status) == ("no room", 503)
        assert nodes.decode.num_open == nodes.prefill.num_open == 0


async def test_a_peer_that_reads_nothing_for_too_long_loses_its_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with both() as nodes:
        monkeypatch.setattr("pdx.messenger.control._MAX_UNSENT_BYTES", -1)
        nodes.ask(1)
        await nodes.decode.over.wait()
        assert "does not read its control messages" in str(nodes.decode.end_reason)
        assert nodes.decoder.settled == [(1, Proof.FENCED)]
