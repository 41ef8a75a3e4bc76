"""A page's latency (half a round trip) while two processes compute: the default way to wait against
waiting without any polling.

Two pairs take turns: one with the default options, one whose workers never spin, which over tcp
leaves the queue's descriptor alone (shm has none: its workers nap). The row has the medians of the
rounds and of their ratio. `--toy`: few samples, no row.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.rows import append_row
from pdx.fabric import FabricOptions, Provider
from pdx.lab.transfers.echo import answer_pages, time_round_trips
from pdx.lab.transfers.endpoint import Endpoint

POOL_BYTES = 1 << 20
NUM_COMPUTING = 2
SPAWN = multiprocessing.get_context("spawn")
WAYS = {"default": FabricOptions(), "descriptor": FabricOptions(spin_us=0)}


def compute() -> None:
    """Until ended."""
    a = np.random.default_rng(1).random((64, 64))
    while True:
        a = np.tanh(a @ a)


def connect(provider: Provider, options: FabricOptions, pipe: Connection) -> Endpoint:
    endpoint = Endpoint(provider, (), POOL_BYTES, options)
    pipe.send(endpoint.descriptor)
    endpoint.connect(pipe.recv())
    return endpoint


def answer(provider: Provider, options: FabricOptions, pipe: Connection, page_bytes: int) -> None:
    """The other process: echo as many pages as it is told, again and again."""
    endpoint = connect(provider, options, pipe)
    with contextlib.suppress(EOFError):
        while True:
            answer_pages(endpoint, page_bytes, pipe.recv(), lambda: pipe.send(None))
    endpoint.close()


class Pair:
    """This process and one that answers."""

    def __init__(self, provider: Provider, options: FabricOptions, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._pipe, theirs = SPAWN.Pipe()
        arguments = (provider, options, theirs, page_bytes)
        self._other = SPAWN.Process(target=answer, args=arguments)
        self._other.start()
        theirs.close()
        self._endpoint = connect(provider, options, self._pipe)

    def latency_us(self, count: int) -> float:
        """Median of so many half round trips."""
        self._pipe.send(count)
        self._pipe.recv()
        taken = time_round_trips(self._endpoint, self._page_bytes, count)
        return statistics.median(taken) / 2000

    def close(self) -> None:
        self._pipe.close()
        self._other.join()
        self._endpoint.close()


@contextmanager
def computing() -> Iterator[None]:
    """Two processes that compute beside."""
    others = [SPAWN.Process(target=compute, daemon=True) for _ in range(NUM_COMPUTING)]
    for other in others:
        other.start()
    yield
    for other in others:
        other.terminate()
        other.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--page-bytes", type=int, default=4096)
    arguments = parser.parse_args()
    rounds, samples = (2, 20) if arguments.toy else (arguments.rounds, arguments.samples)
    providers: tuple[Provider, ...] = (Provider.TCP, Provider.SHM)
    for provider in providers:
        pairs = {way: Pair(provider, WAYS[way], arguments.page_bytes) for way in WAYS}
        with computing():
            taken = [{w: p.latency_us(samples) for w, p in pairs.items()} for _ in range(rounds)]
        for pair in pairs.values():
            pair.close()
        ratios = [each["default"] / each["descriptor"] for each in taken]
        figures = {
            "provider": provider,
            "page_bytes": arguments.page_bytes,
            "rounds": rounds,
            "samples": samples,
            **{f"{way}_us": f"{statistics.median(e[way] for e in taken):.1f}" for way in WAYS},
            "ratio": f"{statistics.median(ratios):.3f}",
            "ratio_p20": f"{np.percentile(ratios, 20):.3f}",
            "ratio_p80": f"{np.percentile(ratios, 80):.3f}",
        }
        print("  ".join(f"{name} {value}" for name, value in figures.items()))
        if not arguments.toy:
            append_row("busy", figures)


if __name__ == "__main__":
    main()
