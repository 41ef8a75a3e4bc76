"""The demo: one chat question, a prefill node and a decode node, the KV cache written between them.

Run by ``scripts/demo``, which sets everything up. Owns the two nodes it starts and ends both,
whatever happens. Exit status: 0 when the tokens equal those of one colocated engine, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import queue
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import httpx
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / ".cache" / "demo"
PDX = Path(sys.executable).with_name("pdx")
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
PROMPT = (
    "Photosynthesis is how green plants, algae and some bacteria make food. They take in sunlight "
    "with chlorophyll, a green pigment in their leaves, water through their roots and carbon "
    "dioxide from the air. With the energy of the light they turn water and carbon dioxide into "
    "sugar, which feeds the plant, and oxygen, which they give back to the air. Almost all life on "
    "Earth depends on it, because plants are at the start of nearly every food chain, and because "
    "animals breathe the oxygen that plants make.\n\nExplain photosynthesis in two sentences."
)


class DemoError(Exception):
    """Something that the demo needs did not happen; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the client saw of one streamed chat completion. Times are seconds."""

    request_id: str
    prompt_ids: list[int]
    token_ids: list[int]
    ttft_s: float
    itls_s: list[float]


@dataclass(slots=True)
class Stream:
    """The chunks of one stream so far."""

    request_id: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    #: When each token arrived; tokens of one chunk arrive together.
    arrivals_s: list[float] = field(default_factory=list)

    def add(self, chunk: dict[str, Any], now_s: float) -> str:
        """Takes in one chunk; returns its text."""
        self.request_id = chunk["id"]
        self.prompt_ids = chunk.get("prompt_token_ids") or self.prompt_ids
        text = ""
        for choice in chunk["choices"]:
            ids = choice.get("token_ids") or []
            self.token_ids += ids
            self.arrivals_s += [now_s] * len(ids)
            text += choice["delta"].get("content") or ""
        return text


def say(text: str) -> None:
    """One line of progress."""
    print(f"==> {text}", file=sys.stderr, flush=True)


class Node:
    """One pdx process: its log on disk, its stdout read by a thread until a wanted line comes."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log_path = LOGS / f"{name}.log"
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [PDX, name, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, pattern: str) -> str:
        """The first group of ``pattern`` in the first line of stdout that has it."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self._give_up(f"has not started within {START_TIMEOUT_S:.0f} s")
            if line is None:
                self._give_up(f"ended with status {self._process.wait()}")
            if match := re.search(pattern, line):
                return match[1]

    def _give_up(self, what: str) -> NoReturn:
        tail = self.log_path.read_text(errors="replace").splitlines()[-15:]
        raise DemoError("\n".join([f"the {self.name} node {what}; its last words:", *tail]))

    def stop(self) -> None:
        """Ends the process: politely, then by force."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(STOP_TIMEOUT_S)


@contextlib.contextmanager
def running(name: str, arguments: Sequence[str]) -> Iterator[Node]:
    """A node that is stopped on the way out."""
    node = Node(name, arguments)
    try:
        yield node
    finally:
        node.stop()


def bundled_model() -> Path:
    """SmolLM2's folder, fetched and converted the first time."""
    path = ROOT / "models" / "smollm2-135m-instruct" / "convert.py"
    spec = importlib.util.spec_from_file_location("smollm2_convert", path)
    assert spec is not None
    assert spec.loader is not None
    convert = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(convert)
    folder: Path = convert.ensure_model()
    return folder


def ask(api_url: str, prompt: str, max_tokens: int) -> Answer:
    """Streams one chat completion to stdout."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    stream = Stream()
    start_s = time.perf_counter()
    with httpx.stream("POST", f"{api_url}/chat/completions", json=body, timeout=120) as response:
        if response.status_code != httpx.codes.OK:
            raise DemoError(f"HTTP {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data in (line, "[DONE]"):
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise DemoError(f"the stream broke off: {chunk['error']['message']}")
            print(stream.add(chunk, time.perf_counter() - start_s), end="", flush=True)
    print(flush=True)
    if not stream.token_ids:
        raise DemoError("the answer has no tokens")
    times = stream.arrivals_s
    return Answer(
        request_id=stream.request_id,
        prompt_ids=stream.prompt_ids,
        token_ids=stream.token_ids,
        ttft_s=times[0],
        itls_s=[later - earlier for earlier, later in itertools.pairwise(times)],
    )


def get_timeline(api_url: str, request_id: str) -> dict[str, Any]:
    """What the decode node knows about the request."""
    response = httpx.get(f"{api_url.removesuffix('/v1')}/pdx/requests/{request_id}", timeout=10)
    if response.status_code != httpx.codes.OK:
        raise DemoError(f"no timeline: HTTP {response.status_code}: {response.text}")
    timeline: dict[str, Any] = response.json()
    return timeline


def generate_colocated(model: Path, prompt_ids: list[int], max_tokens: int) -> list[int]:
    """The same prompt in one engine of its own, prefill and decode together: the oracle."""
    arguments = [
        str(PDX),
        "generate",
        str(model),
        "--json",
        "--dtype",
        "float32",
        "--temperature",
        "0",
    ]
    arguments += ["--max-tokens", str(max_tokens), "--token-ids", ",".join(map(str, prompt_ids))]
    done = subprocess.run(
        arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise DemoError(f"pdx generate ended with status {done.returncode}:\n{done.stderr}")
    ids: list[int] = json.loads(done.stdout)["token_ids"]
    return ids


def milliseconds(seconds: float | None) -> str:
    """A duration for the table."""
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def percentile(values: Sequence[float], percent: int) -> float | None:
    """A percentile; None of nothing."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def report(answer: Answer, timeline: dict[str, Any], equal: bool) -> Table:
    """The table at the end."""
    prefill = None
    if timeline.get("prefill_start_s") is not None and timeline.get("last_layer_s") is not None:
        prefill = timeline["last_layer_s"] - timeline["prefill_start_s"]
    hidden = timeline.get("hidden_share")
    mib = timeline["transfer_bytes"] / 2**20
    table = Table(title="Prefill and decode on two nodes", show_header=False)
    table.add_row("prompt", f"{timeline['prompt_len']} tokens")
    table.add_row("answer", f"{len(answer.token_ids)} tokens")
    table.add_row("prefill time", milliseconds(prefill))
    table.add_row("KV cache moved", f"{mib:.2f} MiB ({timeline['transfer_bytes']:,} bytes)")
    table.add_row("libfabric provider", str(timeline.get("provider") or "-"))
    table.add_row(
        "transfer hidden behind compute", "-" if hidden is None else f"{hidden * 100:.1f} %"
    )
    table.add_row("TTFT", milliseconds(answer.ttft_s))
    p50, p99 = (percentile(answer.itls_s, percent) for percent in (50, 99))
    table.add_row("ITL p50 / p99", f"{milliseconds(p50)} / {milliseconds(p99)}")
    style = "bold green" if equal else "bold red"
    table.add_row("tokens equal to the colocated run", "yes" if equal else "no", style=style)
    return table


def demonstrate(options: argparse.Namespace) -> bool:
    """Runs it all; true when the two token sequences are equal."""
    model = options.model or bundled_model()
    common = ["--dtype", "float32", "--fabric", options.fabric]
    say("starting the prefill node")
    prefill = ["--model", str(model), "--listen", "127.0.0.1:0", *common]
    with running("prefill", prefill) as prefiller:
        peer = prefiller.wait_for(r"--peer[ =](\S+)")
        say(f"starting the decode node, its prefiller is {peer}")
        decode = ["--peer", peer, "--http", "127.0.0.1:0", *common]
        with running("decode", decode) as decoder:
            api_url = decoder.wait_for(r"(http://\S+/v1)")
            say(f"asking {api_url}")
            print(f"\n> {options.prompt}\n", flush=True)
            answer = ask(api_url, options.prompt, options.max_tokens)
            timeline = get_timeline(api_url, answer.request_id)
    say("running the same prompt in one colocated engine")
    expected = generate_colocated(model, answer.prompt_ids, options.max_tokens)
    equal = answer.token_ids == expected
    Console().print(report(answer, timeline, equal))
    return equal


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--prompt", default=PROMPT, help="the question (default: about photosynthesis)"
    )
    parser.add_argument("--fabric", default="auto", choices=["auto", "tcp", "shm"])
    parser.add_argument("--max-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--model", type=Path, help="a model folder (default: SmolLM2-135M)")
    # A terminated demo unwinds like an interrupted one, so that no node outlives it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return 0 if demonstrate(parser.parse_args()) else 1
    except (DemoError, RuntimeError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
