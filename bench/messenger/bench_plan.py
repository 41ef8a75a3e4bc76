"""What planning one long transfer costs the primaries: both sides of a request of 128k tokens.

The decoder counts its atoms; the prefiller checks the request, then plans chunk by chunk, or all at
once where its prefix cache holds the whole prompt. Every call is one slice of an event loop. The
fabric's worker expands layers, so their number changes only counts. `--toy`: no row.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.rows import append_row
from pdx.kv.layout import KvLayout, NodeLayout, kv_heads_of_rank
from pdx.messenger.plan import SendCursor, TransferPlan, atoms_by_rank

NUM_TOKENS, CHUNK, NUM_HEADS, LAYERS = 128 << 10, 8192, 8, 94


def node(tp_size: int, page_size: int) -> NodeLayout:
    rank = KvLayout(
        num_layers=LAYERS,
        num_kv_heads=len(kv_heads_of_rank(NUM_HEADS, tp_size, 0)),
        head_dim=128,
        page_size=page_size,
        num_pages=NUM_TOKENS // page_size + 1,
        itemsize=2,
    )
    return NodeLayout(rank=rank, tp_size=tp_size, num_kv_heads=NUM_HEADS)


def slices_of(src: NodeLayout, dst: NodeLayout, chunk: int) -> list[float]:
    """Milliseconds of the thread's own time in each call of one transfer."""
    src_pages = tuple(range(src.rank.num_pages_for(NUM_TOKENS)))
    dst_pages = list(range(dst.rank.num_pages_for(NUM_TOKENS)))
    taken: list[float] = []

    def timed(call: Callable[[], object]) -> object:
        started = time.thread_time()
        result = call()
        taken.append((time.thread_time() - started) * 1e3)
        return result

    atoms = atoms_by_rank(src, dst, 1, 0, NUM_TOKENS)
    timed(lambda: atoms_by_rank(src, dst, 1, 0, NUM_TOKENS))
    plan = TransferPlan(
        src,
        dst,
        transfer_id=1,
        num_tokens=NUM_TOKENS,
        first_position=0,
        dst_page_indices=dst_pages,
    )
    timed(lambda: plan.check(atoms))
    cursor = SendCursor(plan)
    for end in range(chunk, NUM_TOKENS + 1, chunk):
        timed(partial(cursor.advance, src_pages, end, last=end == NUM_TOKENS))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--samples", type=int, default=50)
    arguments = parser.parse_args()
    count = 2 if arguments.toy else arguments.samples
    for src_tp, dst_tp, src_page, dst_page, chunk in (
        (8, 4, 64, 64, CHUNK),
        (8, 4, 64, 64, NUM_TOKENS),
        (4, 8, 64, 64, CHUNK),
        (8, 4, 64, 16, CHUNK),
    ):
        src, dst = node(src_tp, src_page), node(dst_tp, dst_page)
        runs = [slices_of(src, dst, chunk) for _ in range(count)]
        figures = {
            "src_tp": src_tp,
            "dst_tp": dst_tp,
            "src_page": src_page,
            "dst_page": dst_page,
            "tokens": NUM_TOKENS,
            "layers": LAYERS,
            "chunk": chunk,
            "samples": count,
            "total_cpu_p50_ms": f"{np.median([sum(run) for run in runs]):.3f}",
            "longest_slice_cpu_p50_ms": f"{np.median([max(run) for run in runs]):.3f}",
        }
        print("  ".join(f"{name} {value}" for name, value in figures.items()))
        if not arguments.toy:
            append_row("plan", figures)


if __name__ == "__main__":
    main()
