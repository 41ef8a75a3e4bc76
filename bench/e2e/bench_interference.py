"""What long prompts do to a running stream: gaps between its tokens (ITL) while prompts of 2,000
tokens arrive, one core prefilling and one decoding, against one colocated engine with both cores.

Needs the demo's model (`scripts/demo` makes it) and two idle cores, to which the roles are pinned.
`--toy`: a second of each, and no row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.e2e.bench_handover import MODEL
from bench.e2e.bench_long_prompt import Stream
from bench.rows import ROOT, append_row

PROMPT_LEN, CHUNK = 2000, 512
_COMMON = ["--dtype", "bfloat16", "--kv-memory", "512M", "--chunk", str(CHUNK)]


@contextmanager
def pinned(cores: str, threads: int, *arguments: str) -> Iterator[str]:
    """A node on these cores; yields the last word of the line that it announces."""
    command = ["taskset", "-c", cores, sys.executable, "-m", "pdx", *arguments, *_COMMON]
    with subprocess.Popen(
        [*command, "--threads", str(threads)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, f"{arguments[0]} did not start"
            yield line.split()[-1]
        finally:
            process.terminate()


@contextmanager
def disaggregated(first: int, second: int) -> Iterator[str]:
    """The API of one core that prefills and one that decodes."""
    with (
        pinned(str(first), 1, "prefill", "--model", str(MODEL)) as peer,
        pinned(str(second), 1, "decode", "--peer", peer, "--no-local-fallback") as url,
    ):
        yield url


@contextmanager
def colocated(first: int, second: int) -> Iterator[str]:
    """The API of one engine on both cores."""
    cores = f"{first},{second}"
    with pinned(cores, 2, "serve", str(MODEL), "--colocated") as url:
        yield url


def gaps_under_prompts(url: str, seconds: float) -> tuple[list[float], list[float], int]:
    """The stream's gaps without company, its gaps while prompts run, and how many ran."""
    stream = Stream(url)
    stream.start()
    while len(stream.arrivals) < 10:
        time.sleep(0.05)
    alone_since = time.perf_counter()
    time.sleep(seconds / 3)
    since = time.perf_counter()
    num_prompts = 0
    dice = random.Random(1)
    while time.perf_counter() < since + seconds:
        prompt = [dice.randrange(5, 49000) for _ in range(PROMPT_LEN)]
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        httpx.post(f"{url}/completions", json=body, timeout=300).raise_for_status()
        num_prompts += 1
    until = time.perf_counter()
    stream.is_wanted = False
    stream.join(30)
    return stream.gaps(alone_since, since), stream.gaps(since, until), num_prompts


def figures_of(name: str, url: str, seconds: float) -> dict[str, float]:
    """Of one system, in ms."""
    alone, beside, num_prompts = gaps_under_prompts(url, seconds)
    p99 = sorted(beside)[int(0.99 * (len(beside) - 1))]
    return {
        f"{name}_prompts": num_prompts,
        f"{name}_itl_alone_ms": round(statistics.median(alone) * 1e3, 1),
        f"{name}_itl_p50_ms": round(statistics.median(beside) * 1e3, 1),
        f"{name}_itl_p99_ms": round(p99 * 1e3, 1),
        f"{name}_itl_worst_ms": round(max(beside) * 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="a second of each, no row")
    parser.add_argument("--seconds", type=float, default=60.0, help="of prompts, for each system")
    arguments = parser.parse_args()
    if not MODEL.is_dir():
        raise SystemExit(f"{MODEL} is missing: run scripts/demo once")
    cores = list(itertools.islice(sorted(os.sched_getaffinity(0)), 2))
    if len(cores) < 2:
        raise SystemExit("this bench needs two cores")
    seconds = 1.0 if arguments.toy else arguments.seconds
    figures: dict[str, object] = {"model": MODEL.name, "prompt_tokens": PROMPT_LEN}
    figures |= {"chunk_tokens": CHUNK, "seconds": seconds}
    for name, system in (("apart", disaggregated), ("colocated", colocated)):
        with system(*cores) as url:
            figures |= figures_of(name, url, seconds)
    ratio = float(str(figures["apart_itl_p99_ms"])) / float(str(figures["colocated_itl_p99_ms"]))
    figures["p99_ratio"] = f"{ratio:.3f}"
    print(json.dumps(figures, indent=1))
    if not arguments.toy:
        print(f"row added to {append_row('interference', figures).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
