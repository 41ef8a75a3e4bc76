"""The soak: a prefiller and a decoder under many streams for minutes.

Streams of all lengths; one in ten ends at a stop string, one in ten is left by its client. Checked:
every page is free again on both nodes, as many asyncio tasks and open files as before, and less
than 1 % more memory (RSS) in any process at the end than at minute 1. Prints a table; exit status 1
where something has leaked or a request has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from pdx.fabric import FabricOptions

ROOT = Path(__file__).resolve().parents[1]
#: Memory at a moment is the median of this many seconds before it.
WINDOW_S = 10
MAX_GROWTH = 0.01
BUSY = ("pages_leased", "pages_in_flight", "pages_filled", "pages_quarantined")
QUEUED = ("requests_waiting", "requests_active", "transfers_open")


@dataclass
class Node:
    """A pdx process, its children, and the memory of each over time."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    announced: str
    rss_kib: dict[str, list[int]] = field(default_factory=dict)

    def family(self) -> dict[str, int]:
        """Process ids by what the processes are."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        found = {f"{self.name} primary": pid}
        for child in map(int, children):
            line = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            kind = "frontend" if "pdx.server" in line else "rank"
            found[f"{self.name} {kind}"] = child
        return found

    def sample(self) -> None:
        """Note how much memory each process has resident now."""
        for name, pid in self.family().items():
            status = Path(f"/proc/{pid}/status").read_text()
            [rss] = re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
            self.rss_kib.setdefault(name, []).append(int(rss))

    def num_files(self) -> dict[str, int]:
        """Open files of each process."""
        return {
            n: sum(1 for _ in Path(f"/proc/{p}/fd").iterdir()) for n, p in self.family().items()
        }

    def status(self) -> dict[str, int]:
        """What the node says of itself, asked for by SIGUSR1."""
        said = len(self._reports())
        self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 10
        while len(self._reports()) == said:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise SystemExit(f"the {self.name} node does not answer: {self.log}")
            time.sleep(0.05)
        status: dict[str, int] = json.loads(self._reports()[-1])
        return status

    def _reports(self) -> list[str]:
        return re.findall(r"^status: (.*)$\n", self.log.read_text(), re.MULTILINE)


@contextlib.contextmanager
def started(name: str, folder: Path, *arguments: str) -> Iterator[Node]:
    """A node that is ready; stopped at the end."""
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", "pdx", name, *arguments]
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{name} did not start:\n{log.read_text()}")
            yield Node(name, process, log, line.split()[-1])
        finally:
            process.terminate()
            process.wait(30)


class Load:
    """Clients that never stop asking. ``counts`` says how their requests ended."""

    def __init__(self, url: str, num_streams: int, longest_prompt: int) -> None:
        self._url = url
        self._num_streams = num_streams
        self._longest_prompt = longest_prompt
        self.counts: Counter[str] = Counter()
        self.num_tokens = 0

    async def run(self, seconds: float, nodes: list[Node]) -> None:
        """Keep all streams busy, and note the nodes' memory each second."""
        deadline = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=self._num_streams)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            clients = [self._ask_on(client, i, deadline) for i in range(self._num_streams)]
            running = asyncio.ensure_future(asyncio.gather(*clients))
            try:
                while not running.done() and time.monotonic() < deadline:
                    for node in nodes:
                        node.sample()
                    await asyncio.wait([running], timeout=1)
                await running
            finally:
                running.cancel()

    async def _ask_on(self, client: httpx.AsyncClient, seed: int, deadline: float) -> None:
        dice = random.Random(seed)
        while time.monotonic() < deadline:
            self.counts[await self._ask(client, dice)] += 1

    async def _ask(self, client: httpx.AsyncClient, dice: random.Random) -> str:
        fate = dice.random()
        leaves_after = dice.randint(0, 20) if fate < 0.1 else None
        body = {
            "prompt": [
                dice.randrange(3, 250) for _ in range(dice.randint(1, self._longest_prompt))
            ],
            "max_tokens": dice.randint(1, 64),
            "temperature": 1,
            "seed": dice.randrange(10**6),
            "stream": True,
            "ignore_eos": True,
        } | ({"stop": ["e", "a", " "]} if fate > 0.9 else {})
        seen = 0
        try:
            async with client.stream("POST", f"{self._url}/completions", json=body) as answer:
                if answer.status_code != 200:
                    return f"http {answer.status_code}"
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        return "whole"
                    if line.startswith('data: {"error"'):
                        return "broken off"
                    if line.startswith("data: "):
                        seen, self.num_tokens = seen + 1, self.num_tokens + 1
                    if leaves_after is not None and seen >= leaves_after:
                        return "left"
        except httpx.HTTPError as error:
            return type(error).__name__
        return "cut short"


@dataclass(frozen=True)
class Rest:
    """What is there when nothing runs: numbers that must not grow, by name."""

    levels: dict[str, int]
    #: Why a node is not at rest.
    problems: list[str]


def at_rest(nodes: list[Node], url: str, patience_s: float = 15) -> Rest:
    """Wait until both nodes are at rest; note what is open then."""
    deadline = time.monotonic() + patience_s
    while True:
        found = _look(nodes, url)
        if not found.problems or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def _look(nodes: list[Node], url: str) -> Rest:
    levels, problems = {}, []
    for node in nodes:
        status = node.status()
        busy = {name: status[name] for name in (*BUSY, *QUEUED) if status[name]}
        if busy:
            problems.append(f"{node.name}: {busy}")
        levels[f"{node.name} primary: tasks"] = status["asyncio_tasks"]
        levels |= {f"{name}: open files": count for name, count in node.num_files().items()}
    page = httpx.get(f"{url.removesuffix('/v1')}/metrics").text
    [tasks] = re.findall(r"^pdx_frontend_tasks (\S+)$", page, re.MULTILINE)
    levels["decode frontend: tasks"] = int(float(tasks))
    return Rest(levels, problems)


def memory_rows(nodes: list[Node], baseline_s: int) -> Iterator[tuple[str, str, str, str, bool]]:
    """Name, memory at the baseline and at the end, growth, and whether it is too much."""
    for node in nodes:
        for name, samples in node.rss_kib.items():
            start = max(baseline_s - WINDOW_S, 0)
            before = statistics.median(samples[start : max(baseline_s, 1)])
            after = statistics.median(samples[-WINDOW_S:])
            growth = after / before - 1
            first, last = f"{before / 1024:.1f} MiB", f"{after / 1024:.1f} MiB"
            yield f"{name}: memory", first, last, f"{growth:+.2%}", growth >= MAX_GROWTH


def rest_rows(before: Rest, after: Rest) -> Iterator[tuple[str, str, str, str, bool]]:
    """The same of what must not grow at all."""
    for name, count in before.levels.items():
        now = after.levels[name]
        yield name, str(count), str(now), f"{now - count:+d}", now > count


def tiny_model(folder: Path) -> Path:
    """The tests' tiny Llama."""
    sys.path.insert(0, str(ROOT))
    checkpoints: Any = importlib.import_module("tests.oracle.tiny_checkpoint")
    checkpoints.write_hub_layout(checkpoints.LLAMA, folder)
    return folder


def warm_up(decode: Node, url: str, arguments: argparse.Namespace) -> None:
    """Load until what has a fixed size is in use: libfabric's completion queue takes memory as its
    ring is gone round for the first time, and the prefix cache as its pages fill.
    """
    ring = FabricOptions().queue_entries
    until = time.monotonic() + arguments.warm_up
    while decode.status()["imms_read"] < ring and time.monotonic() < until:
        load = Load(url, arguments.streams, arguments.longest_prompt)
        asyncio.run(load.run(min(10, until - time.monotonic()), []))


def soak(arguments: argparse.Namespace, folder: Path) -> bool:
    """Run it and print the table; whether all is well."""
    model = arguments.model or tiny_model(folder / "tiny-llama")
    seconds = arguments.minutes * 60
    baseline_s = int(min(60, seconds / 2))
    common = ["--fabric", arguments.fabric, "--kv-memory", arguments.kv_memory, "--threads", "1"]
    with (
        started("prefill", folder, "--model", str(model), *common) as prefill,
        started("decode", folder, "--peer", prefill.announced, *common) as decode,
    ):
        nodes, url = [prefill, decode], decode.announced
        warm_up(decode, url, arguments)
        before = at_rest(nodes, url)
        load = Load(url, arguments.streams, arguments.longest_prompt)
        asyncio.run(load.run(seconds, nodes))
        after = at_rest(nodes, url)
    print(f"{sum(load.counts.values())} requests, {load.num_tokens} tokens: {dict(load.counts)}")
    rows = [*memory_rows(nodes, baseline_s), *rest_rows(before, after)]
    width = max(len(row[0]) for row in rows)
    print(f"{'':{width}}  {f'at {baseline_s} s':>12}  {'at the end':>12}  {'growth':>8}")
    for name, first, last, growth, bad in rows:
        print(f"{name:{width}}  {first:>12}  {last:>12}  {growth:>8}{'  LEAK' if bad else ''}")
    failed = {end: n for end, n in load.counts.items() if end not in ("whole", "left")}
    problems = [*before.problems, *after.problems]
    problems += [f"requests failed: {failed}"] if failed else []
    for problem in problems:
        print(f"not at rest, or failed: {problem}")
    return not problems and not any(row[-1] for row in rows)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--streams", type=int, default=64, help="streams at once")
    parser.add_argument("--fabric", default="tcp", choices=("auto", "tcp", "shm"))
    parser.add_argument(
        "--warm-up",
        type=float,
        default=300,
        metavar="SECONDS",
        help="at most, until what has a fixed size is in use; --minutes begin after it",
    )
    parser.add_argument("--model", type=Path, help="a folder; else the tests' tiny model")
    parser.add_argument(
        "--kv-memory", default="16M", help="of each node; small enough to be all in use by minute 1"
    )
    parser.add_argument("--longest-prompt", type=int, default=400, help="tokens")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the nodes end with us
    with tempfile.TemporaryDirectory(prefix="pdx-soak-") as folder:
        sys.exit(0 if soak(arguments, Path(folder)) else 1)


if __name__ == "__main__":
    main()
