"""Does a huge prompt stall other streams? Gaps between the tokens of a running stream (ITL) while a
prompt of 500 kB is tokenised, beside those of the 10 s before; median of five trials.

The prompt exceeds the model's context: it is tokenised whole, then refused. Needs the demo's model
(`scripts/demo` makes it). `--toy`: one trial after 1 s, and no row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.e2e.bench_handover import MODEL, node
from bench.rows import ROOT, append_row

PROMPT_BYTES = 500_000


class Stream(threading.Thread):
    """A stream that never ends by itself; notes when its tokens come."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.arrivals: list[float] = []
        self.is_wanted = True

    def run(self) -> None:
        body = {"prompt": [1, 2, 3], "max_tokens": 8000, "ignore_eos": True, "stream": True}
        while self.is_wanted:
            request = httpx.stream("POST", f"{self._url}/completions", json=body, timeout=300)
            with request as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.arrivals.append(time.perf_counter())
                    if not self.is_wanted:
                        return

    def gaps(self, since: float, until: float) -> list[float]:
        """Gaps that overlap with this time."""
        arrivals = self.arrivals[:]
        pairs = itertools.pairwise(arrivals)
        return [b - a for a, b in pairs if b >= since and a <= until]


@dataclass(frozen=True)
class Trial:
    """Seconds."""

    before_p99: float
    during_p99: float
    num_during: int
    answered: float


def long_text(seed: int) -> str:
    """Words that no cache of the tokenizer has seen."""
    dice = random.Random(seed)
    letters, words, size = "abcdefghijklmnopqrstuvwxyz", [], 0
    while size < PROMPT_BYTES:
        words.append("".join(dice.choices(letters, k=dice.randint(2, 9))))
        size += len(words[-1]) + 1
    return " ".join(words)[:PROMPT_BYTES]


def trial(url: str, stream: Stream, quiet_s: float, seed: int) -> Trial:
    text = long_text(seed)
    body = json.dumps({"prompt": text, "max_tokens": 1})
    time.sleep(quiet_s)
    began = time.perf_counter()
    answer = httpx.post(f"{url}/completions", content=body, timeout=300)
    ended = time.perf_counter()
    assert answer.status_code == 400, answer.text
    assert "context" in answer.text, answer.text
    time.sleep(0.5)  # the gap that the answer fell into ends
    before = stream.gaps(began - quiet_s, began)
    during = stream.gaps(began, ended)
    return Trial(p99(before), p99(during), len(during), ended - began)


def p99(gaps: list[float]) -> float:
    return sorted(gaps)[min(int(len(gaps) * 0.99), len(gaps) - 1)]


def measure(num_trials: int, quiet_s: float) -> dict[str, object]:
    common = ["--dtype", "bfloat16", "--kv-memory", "512M", "--threads", "1"]
    with (
        node("prefill", "--model", str(MODEL), *common) as peer,
        node("decode", "--peer", peer, *common) as url,
    ):
        stream = Stream(url)
        stream.start()
        while len(stream.arrivals) < 10:
            time.sleep(0.1)
        trials = [trial(url, stream, quiet_s, seed) for seed in range(num_trials)]
        stream.is_wanted = False
        stream.join(10)
    ratios = [each.during_p99 / each.before_p99 for each in trials]
    return {
        "model": MODEL.name,
        "prompt_bytes": PROMPT_BYTES,
        "trials": num_trials,
        "quiet_s": quiet_s,
        "itl_p99_before_ms": f"{statistics.median(t.before_p99 for t in trials) * 1e3:.2f}",
        "itl_p99_during_ms": f"{statistics.median(t.during_p99 for t in trials) * 1e3:.2f}",
        "ratio": f"{statistics.median(ratios):.2f}",
        "ratio_worst": f"{max(ratios):.2f}",
        "gaps_during": statistics.median(t.num_during for t in trials),
        "answered_ms": f"{statistics.median(t.answered for t in trials) * 1e3:.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="small, once, no row")
    parser.add_argument("--trials", type=int, default=5)
    arguments = parser.parse_args()
    if not MODEL.is_dir():
        raise SystemExit(f"{MODEL} is missing: run scripts/demo once")
    figures = measure(*((1, 1.0) if arguments.toy else (arguments.trials, 10.0)))
    print(json.dumps(figures, indent=1))
    if not arguments.toy:
        print(f"row added to {append_row('long_prompt', figures).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
