"""Real nodes as a user starts them: processes on loopback with free ports, stopped by pid."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

__all__ = ["Decoder", "Node", "Prefiller", "decoder", "prefiller", "wait_until"]

#: Two nodes share two cores with the tests.
_ENV = {
    "OMP_NUM_THREADS": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
    "PDX_POISON": "1",
    "PDX_DTYPE": "float32",
    "PDX_PAGE_SIZE": "16",
    "PDX_CHUNK": "64",
    "PDX_THREADS": "1",
    "PDX_LOG_LEVEL": "info",
}
START_S = 60.0


def wait_until(condition: Any, *, timeout_s: float, what: str) -> float:
    """Poll until the condition holds; returns how long that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"{what}: not in {timeout_s} s"
        time.sleep(0.02)
    return time.monotonic() - start


@dataclass
class Node:
    """One `pdx` process; its stderr goes to a file."""

    process: subprocess.Popen[bytes]
    log: Path
    announced: str

    @property
    def pid(self) -> int:
        return self.process.pid

    def stderr(self) -> str:
        """What the node has said so far."""
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal to the node's primary."""
        os.kill(self.pid, number)

    def family(self) -> list[int]:
        """The primary and its living descendants."""
        tree, todo = [], [self.pid]
        while todo:
            pid = todo.pop()
            tree.append(pid)
            with contextlib.suppress(OSError):
                todo += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return tree

    def kill(self) -> None:
        """End the primary at once, as a crash does; its children must follow by themselves."""
        self.signal(signal.SIGKILL)
        self.process.wait(timeout=10)

    def stop(self) -> int:
        """End it as Ctrl-C does; returns the exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGINT)
            try:
                self.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"the node did not stop:\n{self.stderr()}") from None
        return self.process.returncode


class Prefiller(Node):
    """A `pdx prefill`."""

    @property
    def address(self) -> str:
        """Its control address."""
        return self.announced.removeprefix("pdx decode --peer ")


@dataclass
class Decoder(Node):
    """A `pdx decode` and a client for its API."""

    client: httpx.Client

    @property
    def url(self) -> str:
        """The API's base URL, with /v1."""
        return self.announced

    def complete(self, prompt: Sequence[int] | str, max_tokens: int, **fields: Any) -> list[int]:
        """Token ids of a greedy completion that ignores EOS."""
        answer = self.post(prompt, max_tokens, **fields)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        token_ids: list[int] = choice["token_ids"]
        return token_ids

    def post(
        self, prompt: Sequence[int] | str, max_tokens: int | None, **fields: Any
    ) -> httpx.Response:
        """A completion request, greedy and without EOS unless the fields say otherwise."""
        body: dict[str, Any] = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        } | fields
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        return self.client.post(f"{self.url}/completions", json=body)

    def health(self) -> dict[str, Any]:
        """What /health says, whatever its status."""
        answer: dict[str, Any] = self.client.get(f"{self.url.removesuffix('/v1')}/health").json()
        return answer

    def is_clean(self) -> bool:
        """Nothing leased, in flight or quarantined, nobody waiting."""
        counts = self.health()["counts"]
        busy = ("leased", "in_flight", "filled", "quarantined")
        return not any(counts[f"pages_{state}"] for state in busy) and not any(
            counts[name] for name in ("requests_waiting", "requests_active", "transfers_open")
        )

    def wait_clean(self, timeout_s: float = 3.0) -> None:
        """Wait until every page is free."""
        wait_until(self.is_clean, timeout_s=timeout_s, what=f"pages come back: {self.health()}")

    def timeline(self, request_id: str) -> dict[str, Any]:
        """A finished request's timeline."""
        base = self.url.removesuffix("/v1")
        answer: dict[str, Any] = self.client.get(f"{base}/pdx/requests/{request_id}").json()
        return answer


def start(arguments: Sequence[str], log: Path, env: dict[str, str] | None = None) -> Node:
    """Start a pdx command; does not wait for anything."""
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "pdx", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | _ENV | (env or {}),
        )
    return Node(process, log, "")


def read_announcement(node: Node, pattern: str, timeout_s: float = START_S) -> str:
    """The first line of the node's stdout."""
    assert node.process.stdout is not None
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ready, _, _ = select.select([node.process.stdout], [], [], 0.2)
        if ready:
            line = node.process.stdout.readline().decode().strip()
            assert re.fullmatch(pattern, line), f"{line!r}\n{node.stderr()}"
            return line
        assert node.process.poll() is None, f"the node ended:\n{node.stderr()}"
    raise AssertionError(f"the node said nothing in {timeout_s} s:\n{node.stderr()}")


@contextmanager
def prefiller(model: Path, log: Path, *arguments: str, **env: str) -> Iterator[Prefiller]:
    """A prefiller that is ready for decoders; stopped at the end unless the test has done it."""
    node = start(["prefill", "--model", str(model), *arguments], log, env)
    try:
        line = read_announcement(node, r"pdx decode --peer \S+")
        yield Prefiller(node.process, node.log, line)
    finally:
        _end(node)


@contextmanager
def decoder(peer: str, log: Path, *arguments: str, **env: str) -> Iterator[Decoder]:
    """A decoder whose API is open; stopped at the end unless the test has done it."""
    node = start(["decode", "--peer", peer, *arguments], log, env)
    try:
        url = read_announcement(node, r"http://\S+/v1")
        with httpx.Client(timeout=60) as client:
            yield Decoder(node.process, node.log, url, client)
    finally:
        _end(node)


def _end(node: Node) -> None:
    family = node.family()
    node.stop()
    wait_until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in family),
        timeout_s=5,
        what=f"all processes of the node end ({family})",
    )
    assert node.process.stdout is not None
    node.process.stdout.close()
