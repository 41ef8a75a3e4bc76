"""What it costs to submit 1,000 pages from Python: open a transfer, hand over the batch, seal it.

The fabric is idle before each. Wall-clock time includes what other processes take of the core; the
thread's own CPU time does not. `--toy`: few samples, no row.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.rows import append_row
from pdx.fabric import PageBatch, Provider, TransferDone
from pdx.lab.transfers.channel import Begin, Channel, Counted, End, Hello, Ready, Verified
from pdx.lab.transfers.endpoint import Endpoint
from pdx.lab.transfers.pattern import Cell, fill, order_of
from pdx.lab.transfers.receiver import SLOT
from pdx.lab.transfers.systems import end_process, local_receiver

POOL_BYTES = 64 << 20
PAGE_BYTES = 4096
GENERATION = 0


def connected(provider: Provider, channel: Channel) -> Endpoint:
    endpoint = Endpoint(provider, (), POOL_BYTES)
    channel.send(Hello(provider=provider, pool_bytes=POOL_BYTES, descriptor=endpoint.descriptor))
    endpoint.connect(channel.expect(Hello).descriptor)
    return endpoint


def samples(channel: Channel, endpoint: Endpoint, num_pages: int, count: int) -> np.ndarray:
    """Microseconds: wall clock, and the thread's own."""
    cell = Cell(
        pool_bytes=POOL_BYTES,
        page_bytes=PAGE_BYTES,
        batch_pages=num_pages,
        layers=1,
        neighbours=1,
        seconds=0,
        number=0,
    )
    src, dst = order_of(cell)
    batch = PageBatch(
        src_pages=src[:num_pages],
        dst_pages=dst[:num_pages],
        page_bytes=PAGE_BYTES,
        num_layers=1,
        src_layer_stride=0,
        dst_layer_stride=0,
    )
    fill(endpoint.pool, cell)
    channel.send(Begin(cell=cell, generation=GENERATION))
    channel.expect(Ready)
    taken = np.empty((count, 2))
    for i in range(count):
        wall, own = time.perf_counter_ns(), time.thread_time_ns()
        transfer = endpoint.fabric.open_transfer(endpoint.link, SLOT, GENERATION)
        endpoint.fabric.write(transfer, batch)
        endpoint.fabric.seal(transfer)
        taken[i] = time.perf_counter_ns() - wall, time.thread_time_ns() - own
        endpoint.wait(TransferDone)
    channel.send(End(atoms=num_pages * count, pages=num_pages))
    channel.expect(Counted)
    assert channel.expect(Verified).wrong == 0
    return taken[count // 10 :] / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--pages", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=2000)
    arguments = parser.parse_args()
    count = 20 if arguments.toy else arguments.samples
    providers: tuple[Provider, ...] = (Provider.TCP, Provider.SHM)
    for provider in providers:
        channel, receiver = local_receiver()
        endpoint = connected(provider, channel)
        taken = samples(channel, endpoint, arguments.pages, count)
        endpoint.close()
        channel.close()
        end_process(receiver)
        p50, p99 = np.percentile(taken, (50, 99), axis=0)
        figures = {
            "provider": provider,
            "pages": arguments.pages,
            "samples": count,
            "wall_p50_us": f"{p50[0]:.1f}",
            "wall_p99_us": f"{p99[0]:.1f}",
            "cpu_p50_us": f"{p50[1]:.1f}",
            "cpu_p99_us": f"{p99[1]:.1f}",
        }
        print("  ".join(f"{name} {value}" for name, value in figures.items()))
        if not arguments.toy:
            append_row("submit", figures)


if __name__ == "__main__":
    main()
