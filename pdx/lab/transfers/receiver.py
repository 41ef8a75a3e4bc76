"""The counting side of `pdx bench transfer`: a child process, or `pdx bench transfer --listen`.

As a module, ``python -m pdx.lab.transfers.receiver FD``, it serves the connection at that
descriptor.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from pdx.errors import FabricError, PeerError, PeerLost, ProtocolError
from pdx.fabric.interface import Arrived
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
)
from pdx.lab.transfers.echo import answer_pages
from pdx.lab.transfers.endpoint import Endpoint
from pdx.lab.transfers.pattern import Cell, available_bytes, count_wrong

__all__ = ["MAX_POOL_BYTES", "SLOT", "check_cell", "serve"]

SLOT = 1
#: A receiver gives no more memory than this to whoever connects.
MAX_POOL_BYTES = 16 << 30
#: More atoms than any cell writes: how many it will be is known at its end.
_OPEN_END = 1 << 60


def serve(
    connection: socket.socket, bind_hosts: Sequence[str], peer: str, file: int | None = None
) -> None:
    """Count for one writer until it leaves.

    Args:
        file: what the writer writes to, as large as it will say; None: memory of its own.

    Raises:
        PeerError: it speaks something else, or stops in the middle of a cell.
        FabricError: the fabric cannot be opened here, or the link went down.
    """
    channel = Channel(connection, peer)
    try:
        hello = channel.expect(Hello)
        _check_hello(hello, new_memory=file is None)
        endpoint = Endpoint(hello.provider, bind_hosts, hello.pool_bytes, file=file)
        try:
            channel.send(
                Hello(
                    provider=hello.provider,
                    pool_bytes=hello.pool_bytes,
                    descriptor=endpoint.descriptor,
                )
            )
            endpoint.connect(hello.descriptor)
            _serve_cells(channel, endpoint, hello.pool_bytes)
        finally:
            endpoint.close()
    finally:
        channel.close()


def check_cell(cell: Cell, pool_bytes: int) -> None:
    """Raise ProtocolError unless the cell lies in the pool."""
    fits = (
        cell.pool_bytes == pool_bytes
        and cell.page_bytes >= 8
        and cell.page_bytes % 8 == 0
        and min(cell.layers, cell.neighbours, cell.batch_pages) >= 1
        and cell.layer_pages >= cell.neighbours
    )
    if not fits:
        raise ProtocolError(f"a cell that does not fit {pool_bytes} bytes: {cell}")


def _check_hello(hello: Hello, *, new_memory: bool) -> None:
    if hello.version != BENCH_VERSION:
        raise ProtocolError(f"the writer's bench is version {hello.version}, not {BENCH_VERSION}")
    if not 4096 <= hello.pool_bytes <= MAX_POOL_BYTES:
        raise ProtocolError(f"a pool of {hello.pool_bytes} bytes is above {MAX_POOL_BYTES}")
    available = available_bytes() if new_memory else None
    if available is not None and hello.pool_bytes > available:
        raise ProtocolError(f"a pool of {hello.pool_bytes} bytes: {available} are left here")


def _serve_cells(channel: Channel, endpoint: Endpoint, pool_bytes: int) -> None:
    while (message := channel.receive_at_leisure()) is not None:
        match message:
            case Begin(cell=cell, generation=generation):
                check_cell(cell, pool_bytes)
                endpoint.fabric.expect(endpoint.link, SLOT, generation, _OPEN_END)
                channel.send(Ready())
                end = channel.expect(End)
                endpoint.fabric.retarget(SLOT, generation, end.atoms)
                endpoint.wait(Arrived)
                channel.send(Counted())
                endpoint.fabric.release(SLOT, generation)
                channel.send(Verified(wrong=count_wrong(endpoint.pool, cell, end.pages)))
            case Echo(page_bytes=page_bytes, count=count) if 0 < page_bytes <= pool_bytes:
                answer_pages(endpoint, page_bytes, count, lambda: channel.send(Ready()))
            case _:
                raise ProtocolError(f"{channel.peer} sent {message} between cells")


def _main() -> int:
    try:
        fd, file, *bind_hosts = sys.argv[1:]
        serve(
            socket.socket(fileno=int(fd)),
            bind_hosts,
            "the writer",
            int(file) if file else None,
        )
    except PeerLost as error:  # the bench has ended, and has said why
        return error.exit_code
    except (FabricError, PeerError) as error:
        sys.stderr.write(f"receiver: {error.message}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main())
