"""The first messages of a connection: who is believed, and what noise comes to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdx.errors import PeerError, PeerRefused
from pdx.messenger.authentication import decoder_code, fresh_nonce, prefiller_code
from pdx.messenger.control import Address, ControlConnection
from pdx.messenger.handshake import describe
from pdx.messenger.messages import (
    Challenge,
    Describe,
    Description,
    Proof,
)
from pdx.request.frames import encode_frame

SECRET = b"correct horse battery staple"
DESCRIPTION = Description(model="m", dtype="float32", page_size=16)


async def describe_server(
    answer: Callable[[ControlConnection], Awaitable[None]], secret: bytes | None
) -> Description:
    """Describe a server that answers like this."""
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = ControlConnection(reader, writer)
        with contextlib.suppress(PeerError):
            await answer(connection)
        await connection.close()
        ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        try:
            return await describe(Address(host="127.0.0.1", port=port), timeout_s=5, secret=secret)
        finally:
            await ended.wait()


def prefiller(secret: bytes, *, change: str = "") -> Callable[[ControlConnection], Awaitable[None]]:
    """A server that has this secret; ``change`` is added to its answer's model on the way."""

    async def answer(connection: ControlConnection) -> None:
        opening = await connection.receive()
        assert isinstance(opening, Describe)
        nonce = fresh_nonce()
        connection.send(Challenge(nonce=nonce))
        assert isinstance(await connection.receive(), Proof)
        mac = prefiller_code(secret, opening, nonce, DESCRIPTION)
        model = DESCRIPTION.model + change
        connection.send(msgspec.structs.replace(DESCRIPTION, mac=mac, model=model))

    return answer


async def test_a_prefiller_with_the_secret_is_believed() -> None:
    assert (await describe_server(prefiller(SECRET), SECRET)).model == "m"


async def test_a_prefiller_with_another_secret_is_not() -> None:
    with pytest.raises(PeerRefused, match="another secret"):
        await describe_server(prefiller(SECRET + b"!"), SECRET)


async def test_an_answer_that_was_changed_on_its_way_is_not_believed() -> None:
    with pytest.raises(PeerRefused, match="another secret"):
        await describe_server(prefiller(SECRET, change="!"), SECRET)


async def test_a_decoders_own_proof_sent_back_proves_nothing() -> None:
    opening, nonce = Describe(nonce=b"n" * 32), fresh_nonce()
    sent = decoder_code(SECRET, opening, nonce)
    assert sent != prefiller_code(SECRET, opening, nonce, DESCRIPTION)


FRAMES = [
    encode_frame(message)
    for message in (DESCRIPTION, Challenge(nonce=b"n"), Proof(mac=b"m"), Describe())
]
noise = st.one_of(
    st.binary(max_size=100),
    st.builds(
        lambda frame, length: frame[:length],
        st.sampled_from(FRAMES),
        st.integers(0, max(map(len, FRAMES))),
    ),
)


@settings(max_examples=80, deadline=None)
@given(answers=st.lists(noise, max_size=3), with_secret=st.booleans())
def test_whatever_a_prefiller_answers_is_a_description_or_an_error_of_ours(
    answers: list[bytes], with_secret: bool
) -> None:
    async def answer(connection: ControlConnection) -> None:
        await connection.receive()
        for each in answers:
            connection._writer.write(each)  # what no honest node can send

    async def ask() -> None:
        try:
            found = await describe_server(answer, SECRET if with_secret else None)
        except PeerError:
            return
        assert found == DESCRIPTION and not with_secret

    asyncio.run(ask())
