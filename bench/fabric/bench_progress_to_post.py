"""From a progress word's store to the first write's hand-over to libfabric, no Python between.

A synthetic writer stores CLOCK_MONOTONIC as the word's value; the worker's own timestamps say when
it saw the word and when it called libfabric. Three ways to wait: the worker spins on a core
of its own, it naps between looks (the default), or it sleeps and the writer's eventfd wakes it. The
row is the best of the runs by p99: a stolen core is the host's doing. `--toy`: few samples, no row.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import multiprocessing
import os
import select
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.rows import append_row
from pdx.fabric import FabricOptions, LinkUp, PageBatch, Provider, TransferDone, open_fabric

MEMORY_BYTES = 1 << 20
SLOT, GENERATION = 1, 1
WORKER_CORE = 0
SPIN_US = 10_000_000
#: The writer runs hot before it stores, or its own cold start would be measured.
WARM_NS = 100_000
MODES = ("spin", "nap", "eventfd")


def leave_worker_core() -> None:
    """Keep this thread off the worker's core, or the worker could not run when we store."""
    others = os.sched_getaffinity(0) - {WORKER_CORE}
    if others:
        os.sched_setaffinity(0, others)


def receive(pipe: Connection, provider: Provider, atoms: int) -> None:
    """The other process: count until told to stop."""
    leave_worker_core()
    memory = mmap.mmap(-1, MEMORY_BYTES)
    fabric = open_fabric(provider=provider)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    link = fabric.open_link(fabric.register(address, MEMORY_BYTES))
    pipe.send(fabric.descriptor(link))
    fabric.connect(link, pipe.recv())
    fabric.expect(link, SLOT, GENERATION, atoms)
    pipe.recv()
    fabric.close()


class Writer:
    """The measured side: a fabric, a word, and a transfer for each sample."""

    def __init__(self, provider: Provider, mode: str, page_bytes: int, pipe: Connection) -> None:
        options = (
            FabricOptions(cpu=WORKER_CORE, spin_us=SPIN_US) if mode == "spin" else FabricOptions()
        )
        self._memory = mmap.mmap(-1, MEMORY_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._word = ctypes.c_uint64()
        self._eventfd = os.eventfd(0)
        self._wake = mode == "eventfd"
        self.fabric = open_fabric(provider=provider, options=options)
        leave_worker_core()
        if self._wake:
            self.fabric.add_wakeup(self._eventfd)
        self._link = self.fabric.open_link(self.fabric.register(self._address, MEMORY_BYTES))
        descriptor = self.fabric.descriptor(self._link)
        self.fabric.connect(self._link, pipe.recv())
        pipe.send(descriptor)
        pages = np.zeros(1, np.uint32)
        self._batch = PageBatch(
            src_pages=pages,
            dst_pages=pages,
            page_bytes=page_bytes,
            num_layers=1,
            src_layer_stride=0,
            dst_layer_stride=0,
        )
        self._wait(LinkUp)

    def sample(self) -> tuple[int, int]:
        """Nanoseconds from the store to the look that saw it, and to the first post."""
        self._word.value = 0
        transfer = self.fabric.open_transfer(self._link, SLOT, GENERATION)
        address = ctypes.addressof(self._word)
        self.fabric.arm(transfer, self._batch, word_address=address, first_value=1)
        self.fabric.seal(transfer)
        time.sleep(0.001)  # the worker takes the batch, and falls asleep where it would
        warm_until = time.monotonic_ns() + WARM_NS
        while time.monotonic_ns() < warm_until:
            pass
        stored = time.monotonic_ns()
        self._word.value = stored
        if self._wake:
            os.eventfd_write(self._eventfd, 1)
        done = self._wait(TransferDone)
        assert done.first_post_ns is not None, done
        assert done.last_progress_ns is not None
        return done.last_progress_ns - stored, done.first_post_ns - stored

    def _wait(self, kind: type) -> TransferDone:
        while True:
            select.select([self.fabric], [], [], 10)
            for event in self.fabric.events():
                if isinstance(event, kind):
                    return event  # type: ignore[return-value]


def run(provider: Provider, mode: str, page_bytes: int, num_samples: int) -> np.ndarray:
    """Samples of one run: two columns, microseconds."""
    warm_up = num_samples // 10
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    receiver = multiprocessing.get_context("spawn").Process(
        target=receive, args=(theirs, provider, num_samples + warm_up)
    )
    receiver.start()
    writer = Writer(provider, mode, page_bytes, ours)
    samples = [writer.sample() for _ in range(num_samples + warm_up)][warm_up:]
    writer.fabric.close()
    ours.send(None)
    receiver.join()
    return np.array(samples) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--page-bytes", type=int, default=4096)
    parser.add_argument("--boost", action="store_true", help="run before other work (root)")
    arguments = parser.parse_args()
    if arguments.boost:
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # what a core of its own would give
    runs, samples = (1, 50) if arguments.toy else (arguments.runs, arguments.samples)
    providers: tuple[Provider, ...] = (Provider.TCP, Provider.SHM)
    for provider in providers:
        for mode in MODES:
            taken = [run(provider, mode, arguments.page_bytes, samples) for _ in range(runs)]
            best = min(taken, key=lambda table: float(np.percentile(table[:, 1], 99)))
            p50, p99 = np.percentile(best, (50, 99), axis=0)
            figures = {
                "provider": provider,
                "mode": mode,
                "page_bytes": arguments.page_bytes,
                "samples": samples,
                "runs": runs,
                "seen_p50_us": f"{p50[0]:.2f}",
                "seen_p99_us": f"{p99[0]:.2f}",
                "post_p50_us": f"{p50[1]:.2f}",
                "post_p99_us": f"{p99[1]:.2f}",
            }
            print("  ".join(f"{name} {value}" for name, value in figures.items()))
            if not arguments.toy:
                append_row("progress_to_post", figures)


if __name__ == "__main__":
    main()
