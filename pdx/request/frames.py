"""Length-prefixed msgpack frames: the one framing of every stream socket (control links, ranks,
frontend).

A frame is a little-endian uint32 length and that many bytes of msgpack. Lengths above the reader's
limit end the connection before anything is allocated.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import msgspec

from pdx.errors import ProtocolError
from pdx.request.ids import from_wire, to_wire

__all__ = ["MAX_LOCAL_FRAME_BYTES", "encode_frame", "frame_decoder", "read_frame", "recv_frame"]

_HEADER = struct.Struct("<I")
#: Local channels carry whole prompts; 64 MiB is 16 million token ids.
MAX_LOCAL_FRAME_BYTES = 64 << 20
_encoder = msgspec.msgpack.Encoder(enc_hook=to_wire)


def frame_decoder(messages: Any) -> msgspec.msgpack.Decoder[Any]:
    """What reads the bodies of frames that hold one of these messages (a Struct, or a union)."""
    return msgspec.msgpack.Decoder(messages, dec_hook=from_wire)


def encode_frame(message: msgspec.Struct) -> bytes:
    """Header and body of one message, ready to be written."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


async def read_frame(
    reader: asyncio.StreamReader,
    decoder: msgspec.msgpack.Decoder[Any],
    max_bytes: int,
    header: bytes | None = None,
) -> Any:
    """Read one message.

    Args:
        header: its first four bytes, where they were read already.

    Raises:
        asyncio.IncompleteReadError: the stream ended (``partial`` is empty at a frame boundary).
        ProtocolError: the frame is too long or is not a message that ``decoder`` accepts.
    """
    if header is None:
        header = await reader.readexactly(_HEADER.size)
    num_bytes = _checked_len(header, max_bytes)
    return _decode(await reader.readexactly(num_bytes), decoder)


def recv_frame(sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any], max_bytes: int) -> Any:
    """Blocking twin of :func:`read_frame` for processes without a loop.

    Raises:
        EOFError: the stream ended.
        ProtocolError: as for :func:`read_frame`.
    """
    num_bytes = _checked_len(_recv_exactly(sock, _HEADER.size), max_bytes)
    return _decode(_recv_exactly(sock, num_bytes), decoder)


def _checked_len(header: bytes, max_bytes: int) -> int:
    num_bytes: int = _HEADER.unpack(header)[0]
    if num_bytes > max_bytes:
        raise ProtocolError(f"a frame of {num_bytes} bytes is longer than the limit of {max_bytes}")
    return num_bytes


def _decode(body: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(
            f"a frame of {len(body)} bytes is no message of ours: {error}"
        ) from error


def _recv_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    view, got = memoryview(buffer), 0
    while got < num_bytes:
        count = sock.recv_into(view[got:])
        if count == 0:
            raise EOFError("the stream ended inside a frame" if got else "the stream ended")
        got += count
    return bytes(buffer)
