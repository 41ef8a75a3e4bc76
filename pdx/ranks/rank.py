"""One rank process, seen from the primary: start it, load the model, run passes, stop it.

Runs on the primary's event loop. The process is `python -m pdx.runner`; it is never imported here,
so that no torch enters the primary. A rank that dies or hangs stops the node: the engine awaits
:meth:`RankProcess.died` through the group (``pdx.ranks.group``).
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import signal
import socket
from collections import deque
from collections.abc import Callable

import msgspec

from pdx.errors import PdxError, WorkerError, error_from_report
from pdx.ranks.child import how_it_ended, start_child, stop_child
from pdx.ranks.memory import RankDescriptors
from pdx.request.batch import Batch, StepOutput
from pdx.request.frames import MAX_LOCAL_FRAME_BYTES, encode_frame
from pdx.request.rank import FromRank, RankConfig, RankFailed, RankLoading, RankReady

__all__ = ["RankProcess"]

logger = logging.getLogger(__name__)
_decoder = msgspec.msgpack.Decoder(FromRank)
_NUM_FDS = 3
_LAST_LINES = 20
_KILLED_HINT = "the system kills so what takes the last of its memory; dmesg would say it"


class RankProcess:
    """Owns the child process and its channel. ``name`` is what messages call it."""

    def __init__(self, name: str = "the rank") -> None:
        self._name = name
        #: The rank's memory, once it is ready; whoever takes the descriptors closes them.
        self.descriptors: RankDescriptors | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._sock: socket.socket | None = None
        self._stderr_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._stderr_task: asyncio.Task[None] | None = None

    async def start(
        self, config: RankConfig, on_loading: Callable[[RankLoading], None]
    ) -> RankReady:
        """Start the process and wait until the model is loaded and the memory mapped.

        Raises:
            PdxError: of the class that the rank reported, or WorkerError if it died.
        """
        self._process, self._sock = await start_child("pdx.runner", stderr=asyncio.subprocess.PIPE)
        assert self._process.stderr is not None
        self._stderr_task = asyncio.create_task(self._pump_stderr(self._process.stderr))
        await self._send(encode_frame(config))
        while True:
            message = await self._receive()
            match message:
                case RankLoading():
                    on_loading(message)
                case RankReady():
                    self.descriptors = await self._receive_descriptors(message.cuda_device)
                    return message
                case _:
                    kind = type(message).__name__
                    raise WorkerError(f"{self._name} answered {kind} while loading")

    @property
    def pid(self) -> int:
        """Process id of the started rank."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int:
        """Exit status of the ended process; negative: a signal's number."""
        assert self._process is not None and self._process.returncode is not None
        return self._process.returncode

    async def send_pass(self, frame: bytes) -> None:
        """Send an encoded Batch.

        Raises:
            PdxError: the rank failed or died; the node must stop.
        """
        await self._send(frame)

    async def receive_pass(self, pass_idx: int) -> StepOutput:
        """Wait for the answer to a pass. Raises as :meth:`send_pass` does."""
        message = await self._receive()
        if not isinstance(message, StepOutput) or message.pass_idx != pass_idx:
            raise WorkerError(f"{self._name} answered {message} to pass {pass_idx}")
        return message

    async def last_words(self) -> PdxError:
        """Read to the end of the channel; returns what the rank failed of, or how it ended."""
        try:
            while True:
                await self._receive()
        except PdxError as error:
            return error

    async def died(self) -> WorkerError:
        """Wait for the process to end; returns why."""
        assert self._process is not None
        await self._process.wait()
        return await self._obituary()

    async def stop(self) -> None:
        """Close the channel, which ends the rank; kill it if not. Keeps the memory mapped."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._process is not None:
            await stop_child(self._process)
        if self._stderr_task is not None:
            await asyncio.wait([self._stderr_task], timeout=1.0)
            self._stderr_task.cancel()

    # ---- inside ---------------------------------------------------------------------------

    async def _send(self, data: bytes) -> None:
        assert self._sock is not None
        try:
            await asyncio.get_running_loop().sock_sendall(self._sock, data)
        except OSError:
            raise await self._obituary() from None

    async def _receive(self) -> RankLoading | RankReady | StepOutput:
        header = await self._read_exactly(4)
        num_bytes = int.from_bytes(header, "little")
        assert num_bytes <= MAX_LOCAL_FRAME_BYTES
        message = _decoder.decode(await self._read_exactly(num_bytes))
        if isinstance(message, RankFailed):
            error = error_from_report(message.kind, message.message)
            error.hint = message.hint
            if message.traceback:
                error.add_note(message.traceback)
            raise error
        assert not isinstance(message, Batch)
        return message

    async def _read_exactly(self, num_bytes: int) -> bytes:
        """Reads no further than asked, because descriptors ride on the byte after a frame."""
        assert self._sock is not None
        loop = asyncio.get_running_loop()
        chunks = bytearray()
        while len(chunks) < num_bytes:
            try:
                data = await loop.sock_recv(self._sock, num_bytes - len(chunks))
            except OSError:
                data = b""
            if not data:
                raise await self._obituary()
            chunks += data
        return bytes(chunks)

    async def _receive_descriptors(self, cuda_device: int | None) -> RankDescriptors:
        assert self._sock is not None
        sock = self._sock
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(sock, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(sock)
        fd_bytes = array.array("i").itemsize * _NUM_FDS
        data, ancillary, _, _ = sock.recvmsg(
            1, socket.CMSG_SPACE(fd_bytes), socket.MSG_CMSG_CLOEXEC
        )
        if not data or not ancillary:
            raise await self._obituary()
        fds = array.array("i")
        fds.frombytes(ancillary[0][2][:fd_bytes])
        kv_fd, progress_fd, eventfd = fds
        return RankDescriptors(
            kv_fd=kv_fd,
            progress_fd=progress_fd,
            progress_eventfd=eventfd,
            cuda_device=cuda_device,
        )

    async def _pump_stderr(self, stream: asyncio.StreamReader) -> None:
        """The rank's stderr goes to our log, and its last lines into the error if it dies."""
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than any line of ours; the reader has dropped it
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._stderr_lines.append(text)
            logger.warning("%s: %s", self._name.removeprefix("the "), text)

    async def _obituary(self) -> WorkerError:
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._process.wait()
        if self._stderr_task is not None:
            await asyncio.wait([self._stderr_task], timeout=0.5)
        how = how_it_ended(self._process.returncode)
        tail = "\n".join(self._stderr_lines)
        return WorkerError(
            f"{self._name} (pid {self._process.pid}) {how}" + (f"\n{tail}" if tail else ""),
            hint=_KILLED_HINT if self._process.returncode == -signal.SIGKILL else None,
        )
