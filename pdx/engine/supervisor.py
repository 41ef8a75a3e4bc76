"""Runs nodes of one machine as child processes: joins what they say, ends all when one ends.

Runs on the event loop of `pdx serve`, in its main thread. Nodes have sessions of their own, so that
a terminal's Ctrl-C reaches the supervisor alone, which stops them in order; the kernel ends them
when the supervisor dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdx.errors import WorkerError
from pdx.ranks.child import how_it_ended

__all__ = ["Supervisor"]

_PR_SET_PDEATHSIG = 1
_LAST_LINES = 15
_LONGEST_LINE_BYTES = 1 << 20
#: A node has this long to end by itself.
_STOP_S = 10.0
_libc = ctypes.CDLL(None)


class _Node:
    """One child process."""

    def __init__(self, name: str, stage: int, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.stage = stage
        self.process = process
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.readers: list[asyncio.Task[None]] = []

    async def ended(self) -> WorkerError:
        """Wait for its end; returns what to tell the user."""
        code = await self.process.wait()
        await asyncio.wait(self.readers, timeout=1.0)  # its last words
        tail = "".join(f"\n  {line}" for line in self.last_lines)
        return WorkerError(
            f"the {self.name} node (pid {self.process.pid}) {how_it_ended(code)}"
            + (f"; its last lines:{tail}" if tail else "")
        )

    async def stop(self, number: int, timeout_s: float) -> None:
        """Ask it to end; kill it when it does not."""
        if self.process.returncode is not None:
            return
        self._signal(number)
        try:
            async with asyncio.timeout(timeout_s):
                await self.process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End it at once; its own children follow."""
        self._signal(signal.SIGKILL)
        await self.process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Supervisor:
    """Owns the nodes. ``on_line`` is called with a node's name and each line that it writes, but
    for the one that says that it is ready.
    """

    def __init__(self, on_line: Callable[[str, str], None]) -> None:
        self._on_line = on_line
        self._nodes: list[_Node] = []

    async def start(
        self, name: str, arguments: Sequence[str], env: Mapping[str, str | None], *, stage: int
    ) -> str:
        """Start `pdx ARGUMENTS` and wait until it is ready; returns the first line of its stdout.

        Args:
            env: variables to set, or (None) to take away.
            stage: nodes of a higher stage are stopped before those of a lower one.

        Raises:
            WorkerError: it ended, or another node did meanwhile.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pdx", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LONGEST_LINE_BYTES,
            env=_changed(os.environ, env),
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        node = _Node(name, stage, process)
        self._nodes.append(node)
        assert process.stdout is not None and process.stderr is not None
        node.readers = [
            asyncio.create_task(self._read(node, process.stdout, announces=True)),
            asyncio.create_task(self._read(node, process.stderr, announces=False)),
        ]
        failure = asyncio.create_task(self.failure())
        try:
            either: list[asyncio.Future[Any]] = [failure, node.announced]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not node.announced.done():
                raise await failure
            return node.announced.result()
        finally:
            failure.cancel()

    async def failure(self) -> WorkerError:
        """Wait until a node ends, which none should; returns which and why."""
        waits = [asyncio.create_task(node.ended()) for node in self._nodes]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in waits:
                task.cancel()

    async def drain(self, timeout_s: float) -> None:
        """Let all nodes finish what runs, stage by stage, and end."""
        await self._stop(signal.SIGTERM, timeout_s + _STOP_S)

    async def stop(self) -> None:
        """End all nodes, stage by stage; cancelled (a second Ctrl-C), kill them."""
        await self._stop(signal.SIGINT, _STOP_S)

    async def _stop(self, number: int, timeout_s: float) -> None:
        try:
            for stage in sorted({node.stage for node in self._nodes}, reverse=True):
                of_stage = [node for node in self._nodes if node.stage == stage]
                await asyncio.gather(*(node.stop(number, timeout_s) for node in of_stage))
        except asyncio.CancelledError:
            await asyncio.gather(*(node.kill() for node in self._nodes))
            raise
        finally:
            readers = [reader for node in self._nodes for reader in node.readers]
            if readers:
                await asyncio.wait(readers, timeout=1.0)

    async def _read(self, node: _Node, stream: asyncio.StreamReader, *, announces: bool) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than any line of ours; the reader has dropped it
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if announces and not node.announced.done():
                node.announced.set_result(text)
                continue
            node.last_lines.append(text)
            self._on_line(node.name, text)


def _changed(env: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    merged: dict[str, str | None] = {**env, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _die_with_parent() -> None:
    """Runs in the child before it becomes a node; this process has no threads that could hold a
    lock there. SIGTERM would only let it drain.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
