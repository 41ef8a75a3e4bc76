"""Messages with many numbers: packed on the wire, and only whole numbers in range get in."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from pdx.errors import ProtocolError
from pdx.messenger.messages import MAX_CONTROL_FRAME_BYTES, ControlMessage, Prefill
from pdx.request.batch import Batch, RequestStart
from pdx.request.frames import encode_frame, frame_decoder, read_frame
from pdx.request.ids import IdArray
from pdx.request.request import SamplingParams
from pdx.request.stream import FromFrontend, Submit

NUM_TOKENS, PAGE = 128 << 10, 16
PREFILL = Prefill(
    transfer_id=1,
    token_ids=IdArray([1, 258, 2**32 - 1]),
    first_position=0,
    page_indices=IdArray([7]),
    slot=1,
    generation=1,
    atoms_by_rank=[3],
)


def read(frame: bytes, messages: Any) -> Any:
    """What a peer makes of a frame."""

    async def run() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(frame)
        reader.feed_eof()
        return await read_frame(reader, frame_decoder(messages), MAX_CONTROL_FRAME_BYTES)

    return asyncio.run(run())


def with_field(name: str, value: object) -> bytes:
    """A Prefill as somebody else may send it."""
    fields = msgspec.msgpack.decode(encode_frame(PREFILL)[4:]) | {name: value}
    body = msgspec.msgpack.encode(fields)
    return len(body).to_bytes(4, "little") + body


def test_ids_are_little_endian_numbers_of_32_bits_on_the_wire() -> None:
    frame = encode_frame(PREFILL)
    assert b"\x01\0\0\0\x02\x01\0\0\xff\xff\xff\xff" in frame
    assert read(frame, ControlMessage) == PREFILL


@pytest.mark.parametrize("name", ["token_ids", "page_indices"])
@pytest.mark.parametrize(
    ("value", "told"),
    [(b"123", "not 3 bytes"), ([1, 2], "not list"), (5, "int"), ("1234", "str")],
)
def test_what_is_no_row_of_ids_breaks_the_protocol(name: str, value: object, told: str) -> None:
    with pytest.raises(ProtocolError, match=told):
        read(with_field(name, value), ControlMessage)


@pytest.mark.parametrize("number", [-1, 2**32])
def test_a_number_out_of_range_is_never_packed(number: int) -> None:
    with pytest.raises(OverflowError):
        IdArray([number])


@settings(max_examples=200)
@given(st.data())
def test_a_changed_frame_is_a_message_or_breaks_the_protocol(data: st.DataObject) -> None:
    body = bytearray(encode_frame(PREFILL)[4:])
    for place in data.draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=3)):
        body[place] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))]
    try:
        message = read(len(body).to_bytes(4, "little") + body, ControlMessage)
    except ProtocolError:
        return
    if isinstance(message, Prefill):
        assert isinstance(message.token_ids, IdArray)
        assert all(0 <= number < 2**32 for number in message.page_indices)


@pytest.mark.parametrize("kind", ["prefill", "submit", "batch"])
def test_a_long_prompt_is_read_without_an_object_for_each_token(kind: str) -> None:
    """What makes reading one a slice of the event loop that nobody notices: 128k objects would be
    several milliseconds.
    """
    ids = IdArray(range(1000, 1000 + NUM_TOKENS))
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    message: Prefill | Submit | Batch
    match kind:
        case "prefill":
            pages = IdArray(range(1000, 1000 + NUM_TOKENS // PAGE))
            message = msgspec.structs.replace(PREFILL, token_ids=ids, page_indices=pages)
            decoder = frame_decoder(ControlMessage)
        case "submit":
            message = Submit(stream_id=1, token_ids=ids, sampling=sampling)
            decoder = frame_decoder(FromFrontend)
        case _:
            start = RequestStart(
                request_id=1, token_ids=ids, num_computed=0, first_output_idx=0, sampling=None
            )
            message = Batch(pass_idx=1, starts=[start], steps=[], removes=[])
            decoder = frame_decoder(Batch)
    body = encode_frame(message)[4:]
    assert len(body) < 4.6 * NUM_TOKENS, "a number has four bytes"
    gc.collect()
    before = sys.getallocatedblocks()
    got = decoder.decode(body)
    assert sys.getallocatedblocks() - before < 200
    assert got == message
