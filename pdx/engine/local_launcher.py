"""Nodes as child processes of this one. Runs on the event loop of `pdx serve`, in its main thread.

Nodes have sessions of their own, so that a terminal's Ctrl-C reaches the supervisor alone, which
stops them in order; the kernel ends them when the supervisor dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from pdx.config.environment import DESCRIPTOR_VARIABLE
from pdx.engine.launcher import Ended, Ending, NodeEvent, NodeSpec, Said, Started
from pdx.engine.node_report import parse_report
from pdx.ranks.child import how_it_ended

__all__ = ["LocalLauncher"]

_PR_SET_PDEATHSIG = 1
_LAST_LINES = 15
_LONGEST_LINE_BYTES = 1 << 20
#: What an ended process has written is read within this time.
_LAST_WORDS_S = 1.0
#: Killed processes are gone within this time, unless a device holds one.
_KILLED_S = 5.0
_LOOK_S = 0.02
_SIGNALS = {
    Ending.DRAIN: signal.SIGTERM,
    Ending.NOW: signal.SIGINT,
    Ending.KILL: signal.SIGKILL,
}
_libc = ctypes.CDLL(None)


class LocalLauncher:
    """See :class:`pdx.engine.launcher.Launcher`."""

    def __init__(self) -> None:
        self._children: dict[str, _Child] = {}
        self._events: asyncio.Queue[tuple[str, NodeEvent]] = asyncio.Queue()

    async def start(self, spec: NodeSpec) -> None:
        child = _Child(spec.name, self._events)
        self._children[spec.name] = child
        await child.start(spec)

    async def replace(self, spec: NodeSpec) -> None:
        await self.stop(spec.name, Ending.KILL, _KILLED_S)
        await self.start(spec)

    async def stop(self, name: str, how: Ending, timeout_s: float) -> None:
        if (child := self._children.get(name)) is not None:
            await child.stop(_SIGNALS[how], timeout_s)

    async def watch(self) -> AsyncIterator[tuple[str, NodeEvent]]:
        while True:
            yield await self._events.get()


class _Child:
    """One child process, from its start to the end of its last descendant."""

    def __init__(self, name: str, events: asyncio.Queue[tuple[str, NodeEvent]]) -> None:
        self._name = name
        self._events = events
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._life: asyncio.Task[None] | None = None

    async def start(self, spec: NodeSpec) -> None:
        reports, theirs = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pdx", *spec.arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=_LONGEST_LINE_BYTES,
                pass_fds=[theirs],
                env=_changed(os.environ, {**spec.env, DESCRIPTOR_VARIABLE: str(theirs)}),
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except BaseException:
            os.close(reports)
            raise
        finally:
            os.close(theirs)
        self._process = process
        self._tell(Started())
        self._life = asyncio.create_task(self._live(process, reports))

    async def stop(self, number: int, timeout_s: float) -> None:
        if self._process is None or self._life is None:  # its start was cancelled
            return
        self._signal(number)
        done, _ = await asyncio.wait([self._life], timeout=timeout_s)
        if not done:
            self._signal(signal.SIGKILL)
            await asyncio.wait([self._life])
        self._life.result()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _live(self, process: asyncio.subprocess.Process, reports: int) -> None:
        assert process.stdout is not None
        readers = [
            asyncio.create_task(self._read_lines(process.stdout)),
            asyncio.create_task(self._read_reports(reports)),
        ]
        try:
            code = await process.wait()
            await _end_session(process.pid)
            await asyncio.wait(readers, timeout=_LAST_WORDS_S)
        finally:
            for reader in readers:
                reader.cancel()
        last_lines = tuple(self._last_lines)
        self._tell(Ended(pid=process.pid, how=how_it_ended(code), last_lines=last_lines))

    async def _read_lines(self, stream: asyncio.StreamReader) -> None:
        while (line := await _next_line(stream)) is not None:
            text = line.decode(errors="replace").rstrip()
            self._last_lines.append(text)
            self._tell(Said(text))

    async def _read_reports(self, fd: int) -> None:
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(fd, "rb", buffering=0)
        )
        with contextlib.closing(transport):
            while (line := await _next_line(stream)) is not None:
                if (report := parse_report(line)) is not None:
                    self._tell(report)

    def _tell(self, event: NodeEvent) -> None:
        self._events.put_nowait((self._name, event))


async def _next_line(stream: asyncio.StreamReader) -> bytes | None:
    """The next line; None: there is no more. One that is longer than any of ours is left out."""
    while True:
        try:
            return await stream.readline() or None
        except ValueError:  # the stream has dropped it
            continue


async def _end_session(session: int) -> None:
    """Kill what is left of a node whose primary has ended. Ranks and frontends notice that end by
    themselves, but one that is stopped or waits for a device does not, and would keep its memory
    and its port from the node that replaces this one.
    """
    try:
        async with asyncio.timeout(_KILLED_S):
            while left := _members(session):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        pass  # only the kernel holds them now


def _members(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, own_session = (
                (folder / "stat").read_text().rpartition(")")[2].split(maxsplit=4)[:4]
            )
        except OSError:  # it has ended meanwhile
            continue
        if int(own_session) == session and state not in "ZX":
            found.append(int(folder.name))
    return found


def _changed(env: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    merged: dict[str, str | None] = {**env, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _die_with_parent() -> None:
    """Runs in the child before it becomes a node; this process has no threads that could hold a
    lock there. SIGTERM would only let it drain.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
