"""What can be measured, one class for each kind of system; all answer the same cells.

The main thread of the bench's process owns them. Each closes the processes that it has started.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdx.errors import FabricError, ProtocolError
from pdx.fabric.interface import MAX_GENERATION, PageBatch, Provider, TransferDone
from pdx.lab.transfers.channel import (
    BENCH_VERSION,
    Begin,
    Channel,
    Counted,
    Echo,
    End,
    Hello,
    Ready,
    Verified,
    peer_name,
)
from pdx.lab.transfers.echo import time_round_trips
from pdx.lab.transfers.endpoint import Endpoint
from pdx.lab.transfers.pattern import Cell, fill, order_of, slices_of
from pdx.lab.transfers.receiver import SLOT

__all__ = ["PdxPair", "Sample", "System", "end_process", "local_receiver", "remote_receiver"]

_MIN_BATCHES = 2
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one system did in one cell."""

    atoms: int
    num_bytes: int
    #: From the first submission until the target has everything.
    seconds: float
    #: Atoms whose bytes were wrong at the target.
    wrong: int
    #: From Python: microseconds to hand over each batch; empty where that is not what is measured.
    submit_us: tuple[float, ...] = ()
    batch_pages: int = 0

    @property
    def gb_per_s(self) -> float:
        """1e9 bytes a second."""
        return self.num_bytes / self.seconds / 1e9


class System(Protocol):
    """Something that moves pages."""

    name: str

    def measure(self, cell: Cell) -> Sample:
        """Run one cell.

        Raises:
            PdxError: it failed; other systems can go on.
        """

    def close(self) -> None:
        """End its processes."""


class PdxPair:
    """pdx itself: the writer is this process, the receiver is at the other end of the channel.

    Args:
        file: what is written from, `pool_bytes` large; None: memory of its own.
    """

    name = "pdx"

    def __init__(
        self,
        channel: Channel,
        receiver: subprocess.Popen[bytes] | None,
        *,
        provider: Provider,
        bind_hosts: Sequence[str],
        pool_bytes: int,
        ahead: int,
        file: int | None = None,
    ) -> None:
        self._channel = channel
        self._receiver = receiver
        self._ahead = ahead
        self._generation = 0
        self._endpoint = Endpoint(provider, bind_hosts, pool_bytes, file=file)
        try:
            descriptor = self._endpoint.descriptor
            channel.send(Hello(provider=provider, pool_bytes=pool_bytes, descriptor=descriptor))
            answer = channel.expect(Hello)
            if answer.version != BENCH_VERSION:
                raise ProtocolError(f"{channel.peer} has version {answer.version} of this bench")
            self._endpoint.connect(answer.descriptor)
        except BaseException:
            self.close()
            raise

    def measure(self, cell: Cell) -> Sample:
        """See :meth:`System.measure`."""
        batches = _batches(cell)
        fill(self._endpoint.pool, cell)
        self._generation = (self._generation + 1) % (MAX_GENERATION + 1)
        self._channel.send(Begin(cell=cell, generation=self._generation))
        self._channel.expect(Ready)
        submit_us: list[float] = []
        pages = running = 0
        begun = time.perf_counter()
        while len(submit_us) < _MIN_BATCHES or time.perf_counter() - begun < cell.seconds:
            batch = next(batches)
            submit_us.append(self._submit(batch))
            pages += len(batch.src_pages)
            running += 1
            if running == self._ahead:
                self._wait_done()
                running -= 1
        for _ in range(running):
            self._wait_done()
        atoms = pages * cell.layers
        self._channel.send(End(atoms=atoms, pages=pages))
        self._channel.expect(Counted)
        seconds = time.perf_counter() - begun
        return Sample(
            atoms=atoms,
            num_bytes=atoms * cell.page_bytes,
            seconds=seconds,
            wrong=self._channel.expect(Verified).wrong,
            submit_us=tuple(submit_us),
            batch_pages=cell.batch_pages,
        )

    def round_trips_us(self, page_bytes: int, count: int) -> list[float]:
        """One page there and one back, ``count`` times."""
        self._channel.send(Echo(page_bytes=page_bytes, count=count))
        self._channel.expect(Ready)
        return [ns / 1000 for ns in time_round_trips(self._endpoint, page_bytes, count)]

    def close(self) -> None:
        """See :meth:`System.close`."""
        self._endpoint.close()
        self._channel.close()
        if self._receiver is not None:
            end_process(self._receiver)

    def _submit(self, batch: PageBatch) -> float:
        begun = time.perf_counter_ns()
        transfer = self._endpoint.fabric.open_transfer(self._endpoint.link, SLOT, self._generation)
        self._endpoint.fabric.write(transfer, batch)
        self._endpoint.fabric.seal(transfer)
        return (time.perf_counter_ns() - begun) / 1000

    def _wait_done(self) -> None:
        done = self._endpoint.wait(TransferDone)
        if done.failed:
            raise FabricError("a transfer failed", code=done.code)


def _batches(cell: Cell) -> Iterator[PageBatch]:
    src, dst = order_of(cell)  # now, not with the first batch: it takes milliseconds
    return (
        PageBatch(
            src_pages=src[pages],
            dst_pages=dst[pages],
            page_bytes=cell.page_bytes,
            num_layers=cell.layers,
            src_layer_stride=cell.layer_bytes,
            dst_layer_stride=cell.layer_bytes,
        )
        for pages in slices_of(cell)
    )


def local_receiver(
    bind_hosts: Sequence[str] = (), file: int | None = None
) -> tuple[Channel, subprocess.Popen[bytes]]:
    """A receiver on this host, and the connection to it. ``file``: see :func:`serve`."""
    ours, theirs = socket.socketpair()
    files = [] if file is None else [file]
    with theirs:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pdx.lab.transfers.receiver", str(theirs.fileno())),
                "".join(map(str, files)),
                *bind_hosts,
            ],
            pass_fds=[theirs.fileno(), *files],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            process_group=0,  # a terminal's Ctrl-C is for the bench; the receiver ends with it
        )
    return Channel(ours, "the receiver"), process


def remote_receiver(host: str, port: int) -> tuple[Channel, str]:
    """The connection to `pdx bench transfer --listen`, and this host's address on it."""
    peer = peer_name(host, port)
    try:
        connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    except OSError as error:
        raise FabricError(
            f"cannot connect to {peer}: {error}",
            hint=f"start `pdx bench transfer --listen {peer}` there",
        ) from error
    return Channel(connection, peer), str(connection.getsockname()[0])


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Give it a moment to leave by itself: its input or its channel has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    if process.poll() is None:
        process.kill()
        process.wait()
