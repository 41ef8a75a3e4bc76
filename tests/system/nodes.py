"""Real nodes as a user starts them: processes on loopback with free ports, stopped by pid."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.system.calls import Call

__all__ = [
    "Decoder",
    "Node",
    "Prefiller",
    "decoder",
    "end",
    "is_alive",
    "prefiller",
    "read_announcement",
    "run_to_end",
    "start",
    "wait_until",
]

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

    def has_child(self, module: str) -> bool:
        """Whether a process of this kind is there."""
        return bool(self.children(module))

    def child(self, module: str) -> int:
        """Process id of the node's only rank (`pdx.runner`) or frontend (`pdx.server`)."""
        [pid] = self.children(module)
        return pid

    def children(self, module: str) -> list[int]:
        """Process ids of all of a kind."""
        return [pid for pid in self.family() if module in _command_line(pid)]

    def signal_child(self, module: str, number: int) -> None:
        """Send a signal to the node's only process of a kind."""
        os.kill(self.child(module), number)

    def signal_family(self, number: int) -> None:
        """Send a signal to all of the node's processes, children first."""
        for pid in reversed(self.family()):
            os.kill(pid, number)

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
        family = self.family()
        self.signal(signal.SIGKILL)
        self.process.wait(timeout=10)
        wait_until(lambda: not any(map(is_alive, family)), timeout_s=2, what=f"{family} end")

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


def faults_in(counts: Mapping[str, int]) -> dict[str, int]:
    """A node's faults by reason, without those that never happened."""
    kind = "faults_"
    return {n.removeprefix(kind): v for n, v in counts.items() if n.startswith(kind) and v}


def moved(node: Prefiller | Decoder, before: Mapping[str, int]) -> dict[str, int]:
    """The faults that a node has counted since it had these."""
    return dict(Counter(node.faults()) - Counter(before))


class Prefiller(Node):
    """A `pdx prefill`."""

    @property
    def address(self) -> str:
        """Its control address."""
        return shlex.split(self.announced)[3]

    def status(self) -> dict[str, int]:
        """Pages, queues and counters, asked for by SIGUSR1."""
        said = len(self._reports())
        self.signal(signal.SIGUSR1)
        wait_until(lambda: len(self._reports()) > said, timeout_s=5, what="the node reports")
        status: dict[str, int] = json.loads(self._reports()[-1])
        return status

    def _reports(self) -> list[str]:
        whole_lines = self.stderr().split("\n")[:-1]
        start = "status: "
        return [line.removeprefix(start) for line in whole_lines if line.startswith(start)]

    def wait_clean(self, timeout_s: float = 3.0) -> float:
        """Wait until every page is free and nothing is queued; returns how long that took."""
        return self.wait_status(_is_clean, timeout_s=timeout_s, what="the prefiller is clean")

    def wait_status(
        self, condition: Callable[[dict[str, int]], bool], *, what: str, timeout_s: float = 3.0
    ) -> float:
        """Wait until the status is as wanted; returns how long that took."""
        return wait_until(lambda: condition(self.status()), timeout_s=timeout_s, what=what)

    def faults(self) -> dict[str, int]:
        """The faults that it has counted, by reason."""
        return faults_in(self.status())


@dataclass
class Decoder(Node):
    """A `pdx decode` and a client for its API."""

    client: httpx.Client
    calls: list[Call] = field(default_factory=list)

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
        self, prompt: Sequence[int] | str | None, max_tokens: int | None, **fields: Any
    ) -> httpx.Response:
        """A completion request, greedy and without EOS unless the fields say otherwise."""
        body = _body(prompt, max_tokens, fields)
        return self.client.post(f"{self.url}/completions", json=body)

    def call(
        self,
        prompt: Sequence[int] | str | None,
        max_tokens: int | None,
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> Call:
        """The same request, sent but not waited for."""
        call = Call(self.url, _body(prompt, max_tokens, fields), headers or {})
        self.calls.append(call)
        return call

    def health(self) -> dict[str, Any]:
        """What /health says, whatever its status."""
        answer: dict[str, Any] = self.client.get(f"{self.url.removesuffix('/v1')}/health").json()
        return answer

    def is_clean(self) -> bool:
        """Nothing leased, in flight or quarantined, nobody waiting."""
        return _is_clean(self.health()["counts"])

    def wait_clean(self, timeout_s: float = 3.0) -> float:
        """Wait until every page is free; returns how long that took."""
        return wait_until(self.is_clean, timeout_s=timeout_s, what="the decoder is clean")

    def counts(self) -> Counter[str]:
        """What /health counts; 0 for what has never happened."""
        return Counter(self.health()["counts"])

    def faults(self) -> dict[str, int]:
        """The faults that it has counted, by reason."""
        return faults_in(self.counts())

    def wait_count(self, name: str, value: int, timeout_s: float = 3.0) -> None:
        """Wait until one of the counts has this value (or has passed it)."""
        wait_until(
            lambda: self.counts()[name] >= value, timeout_s=timeout_s, what=f"{name} is {value}"
        )

    def wait_healthy(self, timeout_s: float = 10.0) -> float:
        """Wait until a prefiller is connected; returns how long that took."""
        return wait_until(
            lambda: self.health()["counts"].get("prefillers", 0) > 0,
            timeout_s=timeout_s,
            what="a prefiller is there",
        )

    def timeline(self, request_id: str) -> dict[str, Any]:
        """A finished request's timeline."""
        base = self.url.removesuffix("/v1")
        answer: dict[str, Any] = self.client.get(f"{base}/pdx/requests/{request_id}").json()
        return answer


def is_alive(pid: int) -> bool:
    """Whether the process runs, or could."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def _body(
    prompt: Sequence[int] | str | None, max_tokens: int | None, fields: dict[str, Any]
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        # No test finds another one's pages, unless it wants to.
        "cache_salt": secrets.token_hex(4),
    } | fields
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    return body


def _is_clean(counts: dict[str, int]) -> bool:
    busy = ("leased", "in_flight", "filled", "quarantined")
    return not any(counts[f"pages_{state}"] for state in busy) and not any(
        counts[name] for name in ("requests_waiting", "requests_active", "transfers_open")
    )


def start(
    arguments: Sequence[str],
    log: Path,
    env: dict[str, str] | None = None,
    within: Sequence[str] = (),
) -> Node:
    """Start a pdx command; does not wait for anything.

    Args:
        within: the command that becomes it, such as one that enters a namespace first.
    """
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*within, sys.executable, "-m", "pdx", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            bufsize=0,  # two lines that come at once are two for select, too
            stderr=stderr,
            env=os.environ | _ENV | (env or {}),
            start_new_session=True,  # a process group of its own, as in a terminal
        )
    return Node(process, log, "")


def run_to_end(
    arguments: Sequence[str],
    log: Path,
    *,
    timeout_s: float,
    env: dict[str, str] | None = None,
    within: Sequence[str] = (),
) -> tuple[int, float, str]:
    """Run a pdx command that ends by itself: exit code, seconds, stderr."""
    began = time.monotonic()
    node = start(arguments, log, env, within)
    try:
        code = node.process.wait(timeout=timeout_s)
    finally:
        end(node)
    return code, time.monotonic() - began, node.stderr()


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
def prefiller(
    model: Path, log: Path, *arguments: str, within: Sequence[str] = (), **env: str
) -> Iterator[Prefiller]:
    """A prefiller that is ready for decoders; stopped at the end unless the test has done it."""
    node = start(["prefill", "--model", str(model), *arguments], log, env, within)
    try:
        line = read_announcement(node, r"pdx decode --peer \S+( --secret-file .+)?")
        yield Prefiller(node.process, node.log, line)
    finally:
        end(node)


@contextmanager
def decoder(peers: str, log: Path, *arguments: str, **env: str) -> Iterator[Decoder]:
    """A decoder whose API is open; stopped at the end unless the test has done it.

    Args:
        peers: addresses of its prefillers, by commas.
    """
    node = start(["decode", *arguments], log, {"PDX_PEER": peers} | env)
    try:
        url = read_announcement(node, r"http://\S+/v1")
        with httpx.Client(timeout=60) as client:
            ready = Decoder(node.process, node.log, url, client)
            try:
                yield ready
            finally:
                for call in ready.calls:
                    call.leave()
    finally:
        end(node)


def end(node: Node) -> None:
    """Stop it as Ctrl-C does, whatever state it is in; all of its processes are gone then."""
    family = node.family()
    if node.process.poll() is None:
        node.signal_family(signal.SIGCONT)
    node.stop()
    wait_until(
        lambda: not any(map(is_alive, family)),
        timeout_s=5,
        what=f"all processes of the node end ({family})",
    )
    assert node.process.stdout is not None
    node.process.stdout.close()
