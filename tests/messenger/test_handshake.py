"""The handshake, both sides of it over real sockets and a simulated data path."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import msgspec
import pytest

from pdx.config.providers import FabricChoice
from pdx.errors import FabricError, PeerError, PeerLost, PeerRefused, ProtocolError
from pdx.lab.simulated_fabric import SimulatedNetwork
from pdx.messenger.control import ControlConnection, connect
from pdx.messenger.handshake import NodeIdentity, describe, welcome
from pdx.messenger.messages import (
    PROTOCOL_VERSION,
    Cancel,
    ControlMessage,
    Describe,
    Draining,
    Hello,
    Refuse,
    Welcome,
)
from pdx.messenger.prefill_link import PrefillLink
from pdx.messenger.slots import SlotTable
from tests.messenger.manifests import ONE_RANK
from tests.messenger.two_nodes import (
    DESCRIPTION,
    SECRET,
    STEP_S,
    DecodeEngine,
    PrefillEngine,
    greeted,
    hub,
    identity,
    network,
    pair,
    serving,
)


@pytest.mark.parametrize("fabric", ["auto", "tcp", "shm"])
@pytest.mark.parametrize("secret", [None, SECRET])
async def test_two_nodes_that_fit_make_a_link(fabric: FabricChoice, secret: bytes | None) -> None:
    async with pair(identity("d", fabric, secret), identity("p", "auto", secret)) as nodes:
        assert nodes.decode.usable and nodes.decode.same_host
        assert nodes.decode.provider == nodes.prefill.provider
        assert nodes.decode.provider == ("tcp" if fabric == "tcp" else "shm")
        assert nodes.decode.max_prompt_len == 64
        assert nodes.prefill.node == "d"
    assert nodes.prefill.over.is_set()


@pytest.mark.parametrize("lacking", [(["shm"], []), ([], ["shm"]), (["shm"], ["shm"])])
async def test_auto_takes_the_next_provider_and_says_why_once(
    lacking: tuple[list[str], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(identity("d", "auto"), identity("p", "auto"), lacking=lacking) as nodes:
        assert nodes.decode.provider == nodes.prefill.provider == "tcp"
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warned == ["shm does not carry pages here, another way does: no room for shm"]


async def test_a_provider_that_was_asked_for_is_not_replaced() -> None:
    with pytest.raises(FabricError, match="no room for shm"):
        async with pair(identity("d", "shm"), identity("p"), lacking=(["shm"], [])):
            pytest.fail("they have a link")
    with pytest.raises(PeerLost, match="cannot be opened: no room for shm"):
        async with pair(identity("d", "shm"), identity("p", "auto"), lacking=([], ["shm"])):
            pytest.fail("they have a link")


@pytest.mark.parametrize(
    ("decoder", "prefiller", "reason"),
    [
        (identity("d", weights_id="x"), identity("p"), r"weights_id +w +x"),
        (identity("d", head_dim=16), identity("p"), "prefiller +decoder"),
        (identity("d", "shm"), identity("p", "tcp"), "no common data path"),
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


async def test_another_layout_of_pages_is_refused_by_name() -> None:
    with pytest.raises(PeerRefused, match=r"kv_layout +head-major +token-major"):
        async with pair(identity("d", kv_layout="token-major"), identity("p")):
            pytest.fail("they have a link")


async def answered(
    answer: Callable[[ControlConnection, Hello], ControlMessage],
    room: SimulatedNetwork | None = None,
    timeout_s: float = STEP_S,
) -> None:
    """Greet a server that answers a Hello like this, and waits for our end."""

    async def serve(connection: ControlConnection) -> None:
        hello = await connection.receive()
        assert isinstance(hello, Hello)
        connection.send(answer(connection, hello))
        await connection.receive()

    with hub(room or network(), "d") as decode_hub:
        async with serving(serve) as address:
            await greeted(
                address, decode_hub, identity("d"), DecodeEngine(), SlotTable(), timeout_s
            )


def welcome_with(hello: Hello, provider: str, descriptor: bytes) -> Welcome:
    return Welcome(
        node="p",
        manifest=ONE_RANK,
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
    """Somebody is there, who writes nothing back."""
    room = network()
    with hub(room, "p") as nobodys:
        silent = nobodys.open_link("tcp", "127.0.0.1", lambda event: None)
        descriptor = silent.fabric.descriptor(silent.link)
        with pytest.raises(PeerLost, match=r"no write came through in 0\.3 s"):
            await answered(lambda _, hello: welcome_with(hello, "tcp", descriptor), room, 0.3)


async def opened_with(opening: ControlMessage) -> list[ControlMessage]:
    """What a prefiller answers to the first message of a connection, and how it ended."""
    outcome: list[object] = []
    with hub(network(), "p") as prefill_hub:

        async def serve(connection: ControlConnection) -> None:
            def make_link(hello: Hello) -> PrefillLink:
                return PrefillLink(
                    connection=connection,
                    hello=hello,
                    hub=prefill_hub,
                    layout=ONE_RANK.layout(),
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
    manifest=ONE_RANK,
    host="elsewhere",
    pid=1,
    descriptors=[],
    nonce=b"n" * 32,
    protocol=PROTOCOL_VERSION,
)


async def test_a_prefiller_says_what_it_serves_and_nothing_more() -> None:
    outcome = await opened_with(Describe(nonce=b"n"))
    assert outcome == [None, DESCRIPTION]


async def test_who_asks_and_leaves_before_the_answer_is_no_bad_connection() -> None:
    """A decoder with several prefillers, of which another has answered first."""
    outcome = []

    async def serve(connection: ControlConnection) -> None:
        def make_link(hello: Hello) -> PrefillLink:
            pytest.fail("it asked for no link")

        who = identity("p", secret=SECRET)
        outcome.append(await welcome(connection, who, DESCRIPTION, 64, make_link))

    async with serving(serve) as address:
        connection = await connect(address, timeout_s=STEP_S)
        connection.send(Describe(nonce=b"n"))
        await connection.close()
    assert outcome == [None]


async def test_whoever_begins_with_something_else_is_cut_off() -> None:
    [error] = await opened_with(Cancel(transfer_id=1))
    assert isinstance(error, ProtocolError) and "began with Cancel" in str(error)


@pytest.mark.parametrize(
    ("hello", "reason", "for_good"),
    [
        (
            msgspec.structs.replace(HELLO, protocol=PROTOCOL_VERSION - 1),
            f"protocol {PROTOCOL_VERSION - 1} of the decoder is not",
            True,
        ),
        (
            msgspec.structs.replace(HELLO, descriptors=[("shm", b"x")]),
            "shared memory does not reach, the hosts differ",
            True,
        ),
        (
            msgspec.structs.replace(HELLO, descriptors=[("tcp", b"x" * 64)]),
            r"the data path \(tcp\) cannot be opened",
            False,
        ),
    ],
)
async def test_an_opening_that_cannot_be_served_is_refused(
    hello: Hello, reason: str, for_good: bool
) -> None:
    ended, answer = await opened_with(hello)
    assert isinstance(answer, Refuse)
    assert re.search(reason, answer.reason)
    assert isinstance(ended, PeerRefused) and ended.message == answer.reason, "both say it"
    assert answer.for_good == for_good


@pytest.mark.parametrize(("for_good", "error"), [(True, PeerRefused), (False, PeerLost)])
async def test_only_a_refusal_for_good_ends_a_decoder(
    for_good: bool, error: type[PeerError]
) -> None:
    """What else PeerConnector meets, it tries again."""
    with pytest.raises(error, match="no descriptors are left") as raised:
        await answered(lambda _, __: Refuse(reason="no descriptors are left", for_good=for_good))
    assert type(raised.value) is error


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
