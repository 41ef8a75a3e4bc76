"""The rank's end of the socket to its primary. Blocking; the rank's main thread. No torch."""

from __future__ import annotations

import socket

import msgspec

from pdx.errors import InternalError
from pdx.request.batch import Batch
from pdx.request.frames import (
    MAX_LOCAL_FRAME_BYTES,
    encode_frame,
    frame_decoder,
    recv_frame,
)
from pdx.request.rank import FromRank, RankConfig, ToRank

__all__ = ["Channel"]


class Channel:
    """Frames in and out. A primary that is gone ends the process: nobody is left to work for."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[ToRank] = frame_decoder(ToRank)

    def receive_config(self) -> RankConfig:
        """The first message.

        Raises:
            InternalError: it is another one.
        """
        message = self._receive()
        if not isinstance(message, RankConfig):
            raise InternalError(f"a rank got {type(message).__name__} before its RankConfig")
        return message

    def receive_batch(self) -> Batch:
        """Wait for the next batch.

        Raises:
            InternalError: another message came.
        """
        message = self._receive()
        if not isinstance(message, Batch):
            raise InternalError(f"a running rank got {type(message).__name__}")
        return message

    def send(self, message: FromRank) -> None:
        """Write one frame."""
        try:
            self._sock.sendall(encode_frame(message))
        except ConnectionError as error:
            raise SystemExit(0) from error

    def send_descriptors(self, descriptors: list[int]) -> None:
        """Write one byte that carries copies of the descriptors; the caller keeps its own."""
        try:
            socket.send_fds(self._sock, [b"\0"], descriptors)
        except ConnectionError as error:
            raise SystemExit(0) from error

    def _receive(self) -> ToRank:
        try:
            message: ToRank = recv_frame(self._sock, self._decoder, MAX_LOCAL_FRAME_BYTES)
        except (EOFError, ConnectionError) as error:
            raise SystemExit(0) from error
        return message
