"""One 2,000-token prompt on two nodes: how much of the transfer hides behind the prefill, and how
long the handover from the last prefill layer to the first token takes, beside a decode step and
beside the pass that it ends with: the first after an idle time, its weights no longer in a cache.

Needs the demo's model (`scripts/demo` makes it). Both nodes run on this machine, so their clocks
agree. `--toy`: a short prompt, once, and no row.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.rows import ROOT, append_row

MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"


@contextlib.contextmanager
def node(*arguments: str) -> Iterator[str]:
    """A pdx node; yields the last word of the line that it announces."""
    command = [sys.executable, "-m", "pdx", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, f"{arguments[0]} did not start"
            yield line.split()[-1]
        finally:
            process.terminate()


def ask(url: str, prompt: list[int], max_tokens: int) -> tuple[dict[str, float], list[float]]:
    """One streamed greedy completion: its timeline, and the gaps between tokens in seconds."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    arrivals, request_id = [], ""
    with httpx.stream("POST", f"{url}/completions", json=body, timeout=300) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                request_id = chunk["id"]
                if any(choice.get("token_ids") for choice in chunk["choices"]):
                    arrivals.append(time.perf_counter())
    base = re.sub(r"/v1$", "", url)
    timeline: dict[str, float] = httpx.get(f"{base}/pdx/requests/{request_id}").json()
    return timeline, [b - a for a, b in itertools.pairwise(arrivals)]


def first_passes_s(trace: Path) -> list[float]:
    """What the pass that samples the first token took, of each request in a decoder's trace."""
    events = json.loads(trace.read_text())
    passes = [event for event in events if event["name"] == "pass"]
    begun = [
        event["ts"] for event in events if event["name"] == "first step" and event["ph"] == "b"
    ]
    return [next(p["dur"] * 1e-6 for p in passes if p["ts"] >= ts) for ts in begun]


def measure(
    fabric: str, prompt_len: int, rounds: int, chunk: int, trace: Path
) -> dict[str, object]:
    """Medians over the rounds, in ms."""
    common = ["--dtype", "bfloat16", "--fabric", fabric, "--kv-memory", "512M", "--threads", "1"]
    runs: list[dict[str, float]] = []
    with (
        node("prefill", "--model", str(MODEL), "--chunk", str(chunk), *common) as peer,
        node("decode", "--peer", peer, "--trace", str(trace), *common) as url,
    ):
        for number in range(rounds + 1):
            prompt = [1 + (i * 7919 + number * 104729) % 49000 for i in range(prompt_len)]
            timeline, gaps = ask(url, prompt, 17)
            if number:  # the first one warms up
                runs.append(timeline | {"step_s": statistics.median(gaps)})
    for run, pass_s in zip(runs, first_passes_s(trace)[1:], strict=True):
        run["first_pass_s"] = pass_s
    return {
        "fabric": fabric,
        "model": MODEL.name,
        "dtype": "bfloat16",
        "prompt_tokens": prompt_len,
        "chunk_tokens": chunk,
        "rounds": rounds,
        "kv_mib": f"{runs[0]['transfer_bytes'] / 2**20:.1f}",
        "hidden_share": f"{statistics.median(r['hidden_share'] for r in runs):.4f}",
        "hidden_share_worst": f"{min(r['hidden_share'] for r in runs):.4f}",
        "prefill_ms": _ms(runs, lambda r: r["last_layer_s"] - r["prefill_start_s"]),
        "arrival_after_last_layer_ms": _ms(runs, lambda r: r["arrived_s"] - r["last_layer_s"]),
        "handover_ms": _ms(runs, lambda r: r["first_token_s"] - r["last_layer_s"]),
        "first_pass_ms": _ms(runs, lambda r: r["first_pass_s"]),
        "handover_less_first_pass_ms": _ms(
            runs, lambda r: r["first_token_s"] - r["last_layer_s"] - r["first_pass_s"]
        ),
        "decode_step_ms": _ms(runs, lambda r: r["step_s"]),
    }


def _ms(runs: list[dict[str, float]], figure: object) -> str:
    assert callable(figure)
    return f"{statistics.median(figure(run) for run in runs) * 1e3:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="small, once, no row")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if not MODEL.is_dir():
        raise SystemExit(f"{MODEL} is missing: run scripts/demo once")
    for fabric in ("tcp", "shm"):
        prompt_len, rounds = (100, 1) if arguments.toy else (2000, arguments.rounds)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            figures = measure(fabric, prompt_len, rounds, 512, trace)
        print(json.dumps(figures, indent=1))
        if not arguments.toy:
            print(f"row added to {append_row('handover', figures).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
