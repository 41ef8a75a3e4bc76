"""What a rank's host does for a pass before its first op: decode steps of 64 requests of 32,768
tokens in pages of 16, each of which gets a new page every 16th step. Microseconds.

    python bench/kernels/bench_batch.py          a row for bench/results/batch.csv
    python bench/kernels/bench_batch.py --toy    small, no row

``begin`` is from the primary's batch to the arrays that ops of a CPU read, with all checks and what
sampling is told; ``stage`` is what a GPU's rank does besides, to fill the buffer that is copied.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bench.rows import ROOT, append_row
from pdx.kernels.staging import Staging
from pdx.request.batch import Batch, RequestStart, RequestStep
from pdx.request.ids import IdArray
from pdx.request.request import SamplingParams
from pdx.runner.requests import RequestTable

PAGE_SIZE = 16


def measure(num_requests: int, seq_len: int, num_steps: int) -> dict[str, list[float]]:
    """Microseconds of each step."""
    num_pages = seq_len // PAGE_SIZE + num_steps // PAGE_SIZE + 1
    table = RequestTable(
        page_size=PAGE_SIZE, num_pages=num_pages * num_requests, vocab_size=100_000
    )
    greedy = SamplingParams(max_tokens=num_steps, temperature=0.0)
    # A request's pages lie apart, and requests get their next page in different steps.
    pages = [
        list(range(idx, num_pages * num_requests, num_requests)) for idx in range(num_requests)
    ]
    lengths = [seq_len - idx % PAGE_SIZE for idx in range(num_requests)]
    starts = [
        RequestStart(
            request_id=idx,
            token_ids=IdArray(range(lengths[idx])),
            num_computed=lengths[idx] - 1,
            first_output_idx=0,
            sampling=greedy,
        )
        for idx in range(num_requests)
    ]
    staging = Staging(torch.device("cpu"))
    times: dict[str, list[float]] = {"begin": [], "stage": []}
    held = [0] * num_requests
    for step in range(num_steps):
        steps = []
        for idx, own in enumerate(pages):
            wanted = -(-(lengths[idx] + step) // PAGE_SIZE)
            new, held[idx] = own[held[idx] : wanted], wanted
            steps.append(
                RequestStep(request_id=idx, num_tokens=1, new_page_indices=new, sample=True)
            )
        batch = Batch(pass_idx=step + 1, starts=starts, steps=steps, removes=[])
        starts = []
        began = time.perf_counter()
        inputs = table.begin_pass(batch)
        built = time.perf_counter()
        inputs.batch.on(staging)
        staged = time.perf_counter()
        if step:  # the first one starts the requests
            times["begin"].append((built - began) * 1e6)
            times["stage"].append((staged - built) * 1e6)
        for idx in range(num_requests):
            table.append_sampled(idx, step)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="small, no row")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32_768, help="of each request")
    parser.add_argument("--steps", type=int, default=300)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # the copy that a GPU would do by itself
    num_requests, seq_len, num_steps = asked.requests, asked.tokens, asked.steps
    if asked.toy:
        num_requests, seq_len, num_steps = 3, 100, 20
    figures: dict[str, object] = {
        "requests": num_requests,
        "tokens": seq_len,
        "page_size": PAGE_SIZE,
        "steps": num_steps,
    }
    for what, values in measure(num_requests, seq_len, num_steps).items():
        p20, *_, p80 = statistics.quantiles(values, n=5)
        for name, value in (("p50", statistics.median(values)), ("p20", p20), ("p80", p80)):
            figures[f"{what}_{name}_us"] = f"{value:.0f}"
    print(json.dumps(figures, indent=1))
    if not asked.toy:
        print(f"row added to {append_row('batch', figures).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
