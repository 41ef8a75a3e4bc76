"""What planning one long transfer costs the primaries: both sides of a request of 128k tokens.

The decoder counts its atoms and writes the message; the prefiller reads, checks and queues it,
writes the first pass's message to its ranks, and plans chunk by chunk, or all at once where its
prefix cache holds the whole prompt. Every call is
one slice of an event loop. The fabric's worker expands layers, so their number changes only counts.
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
from pdx.kv.layout import KvLayout, NodeLayout, kv_heads_of_rank
from pdx.kv.pages import PagePool
from pdx.messenger.actions import Accept
from pdx.messenger.messages import ControlMessage, Prefill
from pdx.messenger.plan import SendCursor, TransferPlan, atoms_by_rank
from pdx.messenger.prefill_side import PrefillSide
from pdx.request.batch import Batch
from pdx.request.frames import encode_frame, frame_decoder
from pdx.request.ids import IdArray
from pdx.scheduler.scheduler import Scheduler, SchedulerLimits

NUM_TOKENS, CHUNK, NUM_HEADS, LAYERS = 128 << 10, 8192, 8, 94
_TOKEN_IDS = IdArray(random.Random(1).randrange(150_000) for _ in range(NUM_TOKENS))
_decoder = frame_decoder(ControlMessage)


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


def ask(src: NodeLayout, dst: NodeLayout, token_ids: IdArray, dst_pages: list[int]) -> bytes:
    """What the decoder's loop does in one go."""
    prefill = Prefill(
        transfer_id=1,
        token_ids=IdArray(token_ids),
        first_position=0,
        page_indices=IdArray(dst_pages),
        slot=1,
        generation=1,
        atoms_by_rank=atoms_by_rank(src, dst, 1, 0, NUM_TOKENS),
    )
    return encode_frame(prefill)[4:]


def take(body: bytes, side: PrefillSide, scheduler: Scheduler) -> None:
    """What the prefiller's loop does in one go."""
    message = _decoder.decode(body)
    (accepted,) = side.on_message(message)
    assert isinstance(accepted, Accept), accepted
    scheduler.submit(1, message.token_ids, None)


def first_pass(scheduler: Scheduler) -> Batch:
    """What the ranks are told first: the whole prompt."""
    while not (admitted := scheduler.admit()):
        pass
    scheduler.start(admitted[0].request_id)
    scheduled = scheduler.schedule()
    assert scheduled is not None
    return scheduled.batch


def slices_of(src: NodeLayout, dst: NodeLayout, chunk: int) -> list[float]:
    """Milliseconds of the thread's own time in each call of one transfer, those with the three
    messages first.
    """
    src_pages = tuple(range(src.rank.num_pages_for(NUM_TOKENS)))
    dst_pages = list(range(dst.rank.num_pages_for(NUM_TOKENS)))
    taken: list[float] = []

    def timed(call: Callable[[], object]) -> object:
        started = time.thread_time()
        result = call()
        taken.append((time.thread_time() - started) * 1e3)
        return result

    side = PrefillSide(src=src, dst=dst)
    limits = SchedulerLimits(
        page_size=src.rank.page_size, chunk_len=chunk, max_num_seqs=8, reserve_output_len=256
    )
    scheduler = Scheduler(limits, PagePool(src.rank.num_pages), "root")
    body = timed(lambda: ask(src, dst, _TOKEN_IDS, dst_pages))
    assert isinstance(body, bytes)
    timed(lambda: take(body, side, scheduler))
    batch = first_pass(scheduler)
    timed(lambda: encode_frame(batch))
    plan = TransferPlan(
        src,
        dst,
        transfer_id=1,
        num_tokens=NUM_TOKENS,
        first_position=0,
        dst_page_indices=dst_pages,
    )
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
            "longest_message_slice_cpu_p50_ms": f"{np.median([max(run[:3]) for run in runs]):.3f}",
        }
        print("  ".join(f"{name} {value}" for name, value in figures.items()))
        if not arguments.toy:
            append_row("plan", figures)


if __name__ == "__main__":
    main()
