"""Both ends of a link in one process, over real sockets and a simulated data path, in real time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from pdx.config.providers import FabricChoice
from pdx.errors import CapacityError, FabricError, PeerError, RequestError
from pdx.fabric import FabricOptions, MemoryPart, Provider
from pdx.kv.pages import Proof
from pdx.lab.simulated_fabric import Conditions, SimulatedFabric, SimulatedNetwork
from pdx.messenger.actions import PrefillTimes
from pdx.messenger.control import Address, ControlConnection, connect
from pdx.messenger.decode_link import Arrival, DecodeLink
from pdx.messenger.decode_side import TransferTimeouts
from pdx.messenger.fabric_hub import FabricHub, MappedMemory
from pdx.messenger.handshake import NodeIdentity, greet, welcome
from pdx.messenger.messages import (
    Description,
    Hello,
    Prefill,
)
from pdx.messenger.prefill_link import PrefillLink
from pdx.messenger.slots import SlotTable
from pdx.metrics.faults import Fault
from pdx.request.batch import ScoredToken
from pdx.request.ids import IdArray
from tests.messenger.manifests import ONE_RANK

DESCRIPTION = Description(model="m", dtype="float32", page_size=16)
SECRET = b"correct horse battery staple"
STEP_S = 10.0


def identity(
    node: str, fabric: FabricChoice = "tcp", secret: bytes | None = None, **changes: object
) -> NodeIdentity:
    manifest = msgspec.structs.replace(ONE_RANK, **changes)
    return NodeIdentity(node=node, manifest=manifest, fabric=fabric, secret=secret)


class _Clock:
    """A simulated network in real time."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def call_at(self, when_ns: int, callback: Callable[..., None], *args: Any) -> None:
        delay_s = max(0.0, (when_ns - self.now_ns()) * 1e-9)
        asyncio.get_running_loop().call_later(delay_s, callback, *args)


def network() -> SimulatedNetwork:
    """What the hubs of a test are joined by."""
    return SimulatedNetwork(random.Random(0), _Clock(), conditions=Conditions())


@contextlib.contextmanager
def hub(room: SimulatedNetwork, node: str, lacking: Sequence[str] = ()) -> Iterator[FabricHub]:
    """A node's fabrics, with memory as ONE_RANK says.

    Args:
        lacking: providers that cannot be opened.
    """
    size = ONE_RANK.layout().total_bytes

    def opener(
        *, provider: Provider, bind_host: Sequence[str], options: FabricOptions
    ) -> SimulatedFabric:
        if provider in lacking:
            raise FabricError(f"no room for {provider}")
        return SimulatedFabric(room, node, provider=provider, options=options)

    mapped = MappedMemory(
        kv_parts=(MemoryPart(address=room.memory.map(bytearray(size)), num_bytes=size),),
        progress_addresses=(room.memory.map(bytearray(8)),),
        progress_eventfds=(),
    )
    opened = FabricHub(mapped, FabricOptions(), opener=opener)
    try:
        yield opened
    finally:
        opened.close()


@dataclass
class DecodeEngine:
    """What a decoder's link tells its engine."""

    settled: list[tuple[int, Proof]] = field(default_factory=list)
    lost: list[RequestError] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    was_settled: asyncio.Event = field(default_factory=asyncio.Event)

    def transfer_settled(self, link: DecodeLink, transfer_id: int, proof: Proof) -> None:
        self.settled.append((transfer_id, proof))
        self.was_settled.set()

    def transfer_lost(
        self, link: DecodeLink, transfer_id: int, error: RequestError, fault: Fault | None
    ) -> None:
        self.lost.append(error)
        self.faults += [] if fault is None else [fault]

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
    released: list[int] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)

    def accept(self, link: PrefillLink, prefill: Prefill) -> None:
        if not self.takes:
            raise CapacityError("no room")
        self.accepted.append(prefill.transfer_id)
        self.was_asked.set()

    def drop(self, link: PrefillLink, transfer_id: int) -> None:
        self.dropped.append(transfer_id)

    def hold_source(self, link: PrefillLink, transfer_id: int) -> None:
        """Its first chunk is armed."""

    def release_source(self, link: PrefillLink, transfer_id: int, *, unproved: bool) -> None:
        self.released.append(transfer_id)

    def on_fault(self, link: PrefillLink, fault: Fault) -> None:
        self.faults.append(fault)

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
        self.decode.start_transfer(
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
        link.end(str(error), None)
        await link.over.wait()
        await connection.close()
        raise
    return link, connection


@contextlib.asynccontextmanager
async def pair(
    decoder: NodeIdentity,
    prefiller: NodeIdentity,
    *,
    takes: bool = True,
    lacking: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> AsyncIterator[Pair]:
    decode_engine, prefill_engine, slots = DecodeEngine(), PrefillEngine(takes), SlotTable()
    made: asyncio.Future[tuple[PrefillLink, ControlConnection]]
    made = asyncio.get_running_loop().create_future()
    room = network()
    decoder_lacks, prefiller_lacks = lacking
    with (
        hub(room, "d", decoder_lacks) as decode_hub,
        hub(room, "p", prefiller_lacks) as prefill_hub,
    ):

        async def serve(connection: ControlConnection) -> None:
            def make_link(hello: Hello) -> PrefillLink:
                return PrefillLink(
                    connection=connection,
                    hello=hello,
                    hub=prefill_hub,
                    layout=ONE_RANK.layout(),
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
            link.end("the test is over", None)
            await serving_decoder


def both(**options: object) -> contextlib.AbstractAsyncContextManager[Pair]:
    return pair(identity("d"), identity("p"), **options)  # type: ignore[arg-type]
