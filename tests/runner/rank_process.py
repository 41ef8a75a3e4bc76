"""Starts a real rank process and speaks its protocol, as a primary would. Blocking."""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import msgspec

from pdx.kv.progress import PROGRESS_BYTES
from pdx.request.batch import Batch, RequestStart, RequestStep, SampledToken, StepOutput
from pdx.request.frames import MAX_LOCAL_FRAME_BYTES, encode_frame, recv_frame
from pdx.request.ids import IdArray
from pdx.request.rank import FromRank, RankConfig, RankFailed, RankLoading, RankReady
from pdx.request.request import SamplingParams

PAGE_SIZE = 16
CHUNK_LEN = 64
GREEDY = SamplingParams(max_tokens=1000, temperature=0.0)


def rank_config(folder: Path, **changes: object) -> RankConfig:
    """A configuration for the tiny models; 1 thread, poisoned memory."""
    config = RankConfig(
        model_folder=str(folder),
        device="cpu",
        dtype="float32",
        page_size=PAGE_SIZE,
        num_pages=64,
        kv_memory_bytes=0,
        num_threads=1,
        chunk_len=CHUNK_LEN,
        poison=True,
    )
    return msgspec.structs.replace(config, **changes)


class RankProcess:
    """A rank of our own. Use as a context manager; the process is ended and reaped on exit."""

    def __init__(self, config: RankConfig, timeout_s: float = 50.0) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(timeout_s)
        self.sock = ours
        self.config = config
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdx.runner", "--fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
        )
        theirs.close()
        self._decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
        self.loading: list[RankLoading] = []
        self.ready: RankReady | None = None
        self.pass_idx = 0
        self.sock.sendall(encode_frame(config))

    def __enter__(self) -> RankProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.sock.close()
        try:
            self.process.wait(timeout=10)
        finally:
            self.process.kill()
            self.process.wait()
            if self.process.stderr is not None:
                self.process.stderr.close()
            if self.ready is not None:
                if self.kv is not None:
                    self.kv.close()
                self.progress.close()
                os.close(self.eventfd)

    def receive(self) -> FromRank:
        message: FromRank = recv_frame(self.sock, self._decoder, MAX_LOCAL_FRAME_BYTES)
        return message

    def wait_ready(self) -> RankReady:
        """Take the loading reports, then map what the rank exports."""
        while isinstance(message := self.receive(), RankLoading):
            self.loading.append(message)
        assert isinstance(message, RankReady), message
        data, ancillary, _, _ = self.sock.recvmsg(1, socket.CMSG_SPACE(3 * 4))
        assert data == b"\0"
        descriptors = array.array("i")
        descriptors.frombytes(ancillary[0][2])
        kv_fd, progress_fd, self.eventfd = descriptors
        self.kv = None  # a GPU's memory has no place in the host's
        if message.cuda_device is None:
            self.kv = mmap.mmap(kv_fd, message.kv_bytes)
        self.progress = mmap.mmap(progress_fd, PROGRESS_BYTES)
        os.close(kv_fd)
        os.close(progress_fd)
        self.ready = message
        return message

    @property
    def progress_value(self) -> int:
        return int(struct.unpack_from("<Q", self.progress)[0])

    def send(
        self,
        steps: list[RequestStep],
        starts: list[RequestStart] | None = None,
        removes: list[int] | None = None,
    ) -> None:
        """Send the next pass without waiting for its output."""
        self.pass_idx += 1
        batch = Batch(
            pass_idx=self.pass_idx, starts=starts or [], steps=steps, removes=removes or []
        )
        self.sock.sendall(encode_frame(batch))

    def run(
        self,
        steps: list[RequestStep],
        starts: list[RequestStart] | None = None,
        removes: list[int] | None = None,
    ) -> list[SampledToken]:
        """Send the next pass and wait for its tokens."""
        return self.run_pass(steps, starts, removes).tokens

    def run_pass(
        self,
        steps: list[RequestStep],
        starts: list[RequestStart] | None = None,
        removes: list[int] | None = None,
    ) -> StepOutput:
        """Send the next pass and wait for all that it gives."""
        self.send(steps, starts, removes)
        output = self.receive()
        assert isinstance(output, StepOutput), output
        assert output.pass_idx == self.pass_idx
        return output

    def expect_failure(self) -> RankFailed:
        """The rank reports a failure and exits with 1."""
        while isinstance(message := self.receive(), RankLoading):
            pass
        assert isinstance(message, RankFailed), message
        assert self.process.wait(timeout=20) == 1
        return message

    def generate(
        self,
        request_id: int,
        prompt: list[int],
        num_tokens: int,
        pages: list[int],
        sampling: SamplingParams = GREEDY,
    ) -> list[SampledToken]:
        """Prefill in chunks (the last prompt token in a step of its own), decode, forget it.

        Args:
            pages: page indices to use, in this order; taken as they are needed.
        """
        start = RequestStart(
            request_id=request_id,
            token_ids=IdArray(prompt),
            num_computed=0,
            first_output_idx=0,
            sampling=sampling,
        )
        feed = PageFeed(pages)
        starts: list[RequestStart] = [start]
        for begin in range(0, len(prompt) - 1, CHUNK_LEN):
            end = min(begin + CHUNK_LEN, len(prompt) - 1)
            self.run([feed.step(request_id, begin, end, sample=False)], starts)
            starts = []
        tokens: list[SampledToken] = []
        for position in range(len(prompt) - 1, len(prompt) - 1 + num_tokens):
            tokens += self.run([feed.step(request_id, position, position + 1, sample=True)], starts)
            starts = []
        self.run([], removes=[request_id])
        return tokens


class PageFeed:
    """Hands a request its pages as its context grows."""

    def __init__(self, pages: list[int], page_size: int = PAGE_SIZE) -> None:
        self._pages = pages
        self._page_size = page_size
        self._given = 0

    def step(
        self,
        request_id: int,
        begin: int,
        end: int,
        *,
        sample: bool,
        zero_last_page: bool = False,
        may_draft: bool = False,
    ) -> RequestStep:
        """The step that runs positions ``begin .. end`` (the last one a draft's, where the step may
        feed one), with the pages it still needs.
        """
        needed = max(-(-end // self._page_size), self._given)
        new = self._pages[self._given : needed]
        assert len(new) == needed - self._given, "the test gave too few pages"
        self._given = needed
        return RequestStep(
            request_id=request_id,
            num_tokens=end - begin - may_draft,
            new_page_indices=new,
            sample=sample,
            zero_last_page=zero_last_page,
            may_draft=may_draft,
        )
