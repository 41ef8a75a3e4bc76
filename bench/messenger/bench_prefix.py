"""What the prefix cache costs a primary for one long prompt of 128k tokens, slice by slice.

A prompt that is new is hashed in slices, leased and published (as a decoder does once its KV cache
is there), and ends with the rest to publish; the same one again is hashed and found whole; one that
shares nothing makes another one's pages leave the cache. Every call is one slice of an event loop.
`--toy`: no row.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.rows import append_row
from pdx.kv.pages import PagePool
from pdx.request.request import SamplingParams
from pdx.scheduler.scheduler import Scheduler, SchedulerLimits

NUM_TOKENS, CHUNK = 128 << 10, 8192


def slices_of(page_size: int, token_ids: list[int]) -> dict[str, list[float]]:
    """Milliseconds of the thread's own time in each call, by what was done."""
    limits = SchedulerLimits(
        page_size=page_size, chunk_len=CHUNK, max_num_seqs=8, reserve_output_len=256
    )
    scheduler = Scheduler(limits, PagePool(2 * NUM_TOKENS // page_size), "root")
    parts = ("hash", "admit", "publish", "find", "end", "evict")
    taken: dict[str, list[float]] = {part: [] for part in parts}

    def timed(what: str, call: Callable[[], object]) -> None:
        started = time.thread_time()
        call()
        taken[what].append((time.thread_time() - started) * 1e3)

    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    others = [token_id + 1 for token_id in token_ids]
    for request_id, admit, ids in (
        (1, "admit", token_ids),
        (2, "find", token_ids),
        (3, "admit", others),
        (4, "evict", token_ids[1:]),
    ):
        scheduler.submit(request_id, ids, sampling)
        while scheduler.is_hashing:
            timed("hash", scheduler.hash_some)
        timed(admit, scheduler.admit)
        while scheduler.is_hashing:  # pages leave the cache first
            timed(admit, scheduler.hash_some)
            timed(admit, scheduler.admit)
        begin = partial(scheduler.start, request_id, num_computed=NUM_TOKENS - 1)
        timed("publish", begin)
        timed("end", partial(scheduler.abort, request_id))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--samples", type=int, default=50)
    arguments = parser.parse_args()
    count = 2 if arguments.toy else arguments.samples
    dice = random.Random(1)
    token_ids = [dice.randrange(150_000) for _ in range(NUM_TOKENS)]
    for page_size in (64, 16):
        runs = [slices_of(page_size, token_ids) for _ in range(count)]
        figures = {
            "page_size": page_size,
            "tokens": NUM_TOKENS,
            "samples": count,
            "hash_slices": len(runs[0]["hash"]) // 4,
        }
        for what in runs[0]:
            longest = np.median([max(run[what]) for run in runs])
            figures[f"longest_{what}_slice_cpu_p50_ms"] = f"{longest:.3f}"
        print("  ".join(f"{name} {value}" for name, value in figures.items()))
        if not arguments.toy:
            append_row("prefix", figures)


if __name__ == "__main__":
    main()
