"""The gap between tokens that a client sees from two nodes, the prefiller idle, beside the step of
transformers on as many threads: 128 tokens of prompt, 128 of answer, in alternating rounds.

Needs the demo's model (`scripts/demo` makes it). `--toy`: a short answer, once, and no row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.e2e.bench_cpu_decode import Transformers, prompts_of
from bench.e2e.bench_handover import MODEL, ask, node
from bench.rows import ROOT, append_row

PROMPT_LEN = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="a short answer, once, no row")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if not MODEL.is_dir():
        raise SystemExit(f"{MODEL} is missing: run scripts/demo once")
    torch.set_num_threads(arguments.threads)
    answer_len, rounds = (8, 1) if arguments.toy else (128, arguments.rounds)
    prompts = prompts_of(1, PROMPT_LEN)
    transformers = Transformers(MODEL, arguments.dtype)
    common = ["--dtype", arguments.dtype, "--kv-memory", "256M"]
    ours, theirs = [], []
    with (
        node("prefill", "--model", str(MODEL), "--threads", "1", *common) as peer,
        node("decode", "--peer", peer, "--threads", str(arguments.threads), *common) as url,
    ):
        ask(url, prompts[0], 4)  # both warm up
        transformers.run(prompts, 4)
        for _ in range(rounds):
            _, gaps_s = ask(url, prompts[0], answer_len)
            ours.append(statistics.median(gaps_s) * 1e3)
            _, steps_s = transformers.run(prompts, answer_len)
            theirs.append(statistics.median(steps_s) * 1e3)
    figures: dict[str, object] = {
        "model": MODEL.name,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "prompt_tokens": PROMPT_LEN,
        "answer_tokens": answer_len,
        "rounds": rounds,
        "itl_p50_ms": f"{statistics.median(ours):.2f}",
        "transformers_itl_p50_ms": f"{statistics.median(theirs):.2f}",
        "ratio": f"{statistics.median(o / t for o, t in zip(ours, theirs, strict=True)):.3f}",
    }
    print(json.dumps(figures, indent=1))
    if not arguments.toy:
        print(f"row added to {append_row('itl', figures).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
