"""How long failures take: from a client's leaving to free pages on both nodes, from a prefiller's
death, or its stop, to the decision what becomes of its prompts.

Needs the demo's model (`scripts/demo` makes it). Prompts of 2,000 tokens in chunks of 128, left or
hit at a random moment of their prefill. `--toy`: one round of each, and no row.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.e2e.bench_handover import MODEL
from bench.rows import ROOT, append_row

PROMPT_LEN, CHUNK = 2000, 128
BUSY = ("pages_leased", "pages_in_flight", "pages_filled", "pages_quarantined")
_LOOK_S = 0.002


class Nodes:
    """A prefiller, which may be started again at its address, and a decoder."""

    def __init__(self, fabric: str) -> None:
        self._stack = ExitStack()
        self._options = ["--dtype", "bfloat16", "--fabric", fabric, "--kv-memory", "512M"]
        self._options += ["--threads", "1"]
        self.prefiller, self.address = self.start_prefiller("127.0.0.1:0")
        _, self.url = self._start("decode", "--peer", self.address)
        self.client = self._stack.enter_context(httpx.Client(timeout=60))

    def start_prefiller(self, listen: str) -> tuple[subprocess.Popen[str], str]:
        """A prefiller and its control address."""
        own = ["--model", str(MODEL), "--chunk", str(CHUNK), "--listen", listen]
        self.prefiller, self.address = self._start("prefill", *own)
        return self.prefiller, self.address

    def _start(self, *arguments: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "pdx", *arguments, *self._options]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._stack.callback(self._end, process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"{arguments[0]} did not start"
        return process, line.split()[-1]

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        for number in (signal.SIGCONT, signal.SIGINT):
            process.send_signal(number)
        process.wait(30)

    def signal_prefiller(self, number: int) -> None:
        """To the primary and its rank."""
        pid = self.prefiller.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (pid, *map(int, children)):
            os.kill(each, number)

    def begin(self, seed: int) -> http.client.HTTPConnection:
        """Send a prompt; returns when its transfer is under way."""
        dice = random.Random(seed)
        body = {
            "prompt": [dice.randrange(5, 49000) for _ in range(PROMPT_LEN)],
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
        }
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
        head = {"content-type": "application/json"}
        connection.request("POST", f"{parts.path}/completions", json.dumps(body), head)
        wait(lambda: any(t["atoms_landed"] for t in self.transfers()["live"]))
        time.sleep(dice.uniform(0, 0.5))
        return connection

    def transfers(self) -> dict[str, list[dict[str, object]]]:
        """The decoder's, as its primary knows them now."""
        base = self.url.removesuffix("/v1")
        found: dict[str, list[dict[str, object]]] = self.client.get(f"{base}/pdx/transfers").json()
        return found

    def source_is_free(self) -> bool:
        """No page of the prefiller is used."""
        counts = self.client.get(f"http://{self.address}/health").json()["counts"]
        return not any(counts[name] for name in BUSY)

    def wait_linked(self) -> None:
        """The decoder has its prefiller."""
        base = self.url.removesuffix("/v1")
        wait(lambda: self.client.get(f"{base}/health").json()["counts"].get("prefillers"))

    def close(self) -> None:
        """Stop both."""
        self._stack.close()


def wait(condition: Callable[[], object], timeout_s: float = 60.0) -> float:
    """Seconds until it holds."""
    began = time.perf_counter()
    while not condition():
        if time.perf_counter() - began > timeout_s:
            raise SystemExit("a condition did not come true in time")
        time.sleep(_LOOK_S)
    return time.perf_counter() - began


def cancel(nodes: Nodes, seed: int) -> tuple[float, float]:
    """Seconds from a client's leaving to free pages: of the decoder, of the prefiller."""
    connection = nodes.begin(seed)
    began = time.perf_counter()
    connection.close()
    wait(lambda: not nodes.transfers()["live"])
    here = time.perf_counter() - began
    wait(nodes.source_is_free)
    return here, time.perf_counter() - began


def lose(nodes: Nodes, seed: int, number: int) -> float:
    """Seconds from a signal at the prefiller to the loss of its transfer."""
    connection = nodes.begin(seed)
    [transfer_id] = [transfer["transfer_id"] for transfer in nodes.transfers()["live"]]
    began = time.perf_counter()
    nodes.signal_prefiller(number)

    def is_lost() -> bool:
        found = nodes.transfers()
        every = [*found["live"], *found["recent"]]
        return any(t["transfer_id"] == transfer_id and t["state"] == "lost" for t in every)

    wait(is_lost)
    took_s = time.perf_counter() - began
    connection.close()
    if number == signal.SIGKILL:
        nodes.prefiller.wait()
        nodes.start_prefiller(nodes.address)
    else:
        nodes.signal_prefiller(signal.SIGCONT)
    nodes.wait_linked()
    wait(lambda: not nodes.transfers()["live"])
    return took_s


def percentile(values: list[float], share: float) -> str:
    """In ms."""
    return f"{sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1e3:.1f}"


def measure(fabric: str, num_cancels: int, num_losses: int) -> dict[str, object]:
    """One row."""
    nodes = Nodes(fabric)
    try:
        nodes.begin(0).getresponse().read()  # warms up
        cancels = [cancel(nodes, seed) for seed in range(1, num_cancels + 1)]
        here, source = ([pair[i] for pair in cancels] for i in (0, 1))
        kills = [lose(nodes, 1000 + i, signal.SIGKILL) for i in range(num_losses)]
        stops = [lose(nodes, 2000 + i, signal.SIGSTOP) for i in range(num_losses)]
    finally:
        nodes.close()
    return {
        "fabric": fabric,
        "model": MODEL.name,
        "prompt_tokens": PROMPT_LEN,
        "chunk_tokens": CHUNK,
        "cancels": num_cancels,
        "cancel_decoder_p50_ms": percentile(here, 0.5),
        "cancel_decoder_p99_ms": percentile(here, 0.99),
        "cancel_source_p50_ms": percentile(source, 0.5),
        "cancel_source_p99_ms": percentile(source, 0.99),
        "losses": num_losses,
        "killed_median_ms": f"{statistics.median(kills) * 1e3:.1f}",
        "killed_worst_ms": f"{max(kills) * 1e3:.1f}",
        "stopped_median_ms": f"{statistics.median(stops) * 1e3:.1f}",
        "stopped_worst_ms": f"{max(stops) * 1e3:.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="once, no row")
    parser.add_argument("--cancels", type=int, default=100)
    parser.add_argument("--losses", type=int, default=5)
    arguments = parser.parse_args()
    if not MODEL.is_dir():
        raise SystemExit(f"{MODEL} is missing: run scripts/demo once")
    for fabric in ("tcp",) if arguments.toy else ("tcp", "shm"):
        counts = (1, 1) if arguments.toy else (arguments.cancels, arguments.losses)
        figures = measure(fabric, *counts)
        print(json.dumps(figures, indent=1))
        if not arguments.toy:
            print(f"row added to {append_row('failures', figures).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
