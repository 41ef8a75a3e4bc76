"""How far models have been loaded, on stderr: bars on a terminal, elsewhere a line now and then; in
a node under a supervisor, reports to that one, which shows them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from pdx.cli.output import is_json, node_line, status_line
from pdx.engine.launcher import NodeEvent, Said, Started
from pdx.engine.node_report import Loading, Ready, Reporter

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from pdx.request.rank import RankLoading

__all__ = ["NodesView", "loading_progress"]

#: Between two lines about one node.
_LINE_S = 5.0
#: Between two drawings of the bars.
_DRAW_S = 0.2


class _Lines:
    """Says how far one model is, now and then.

    Args:
        say: takes a line.
        first_s: nothing is said of a model that is loaded in less time.
    """

    def __init__(self, say: Callable[[str], None], *, first_s: float) -> None:
        self._say = say
        self._start_s = time.monotonic()
        self._next_s = self._start_s + first_s
        self._has_said = False

    def show(self, done_bytes: int, total_bytes: int) -> None:
        """So much is loaded."""
        now_s = time.monotonic()
        is_end = done_bytes >= total_bytes and self._has_said
        if now_s < self._next_s and not is_end:
            return
        self._has_said, self._next_s = not is_end, now_s + _LINE_S
        amount, took_s = _amount(done_bytes, total_bytes), now_s - self._start_s
        self._say(f"{amount} of weights loaded, {took_s:.0f} s")


@contextlib.contextmanager
def loading_progress(
    what: str, *, first_s: float = _LINE_S
) -> Iterator[Callable[[RankLoading], None]]:
    """For the one model of a command; gives what takes its progress."""
    reporter = Reporter(os.environ)
    if reporter.is_heard:
        yield lambda far: reporter.send(
            Loading(done_bytes=far.done_bytes, total_bytes=far.total_bytes)
        )
        return
    if not _draws():
        lines = _Lines(lambda line: status_line(f"{what}: {line}"), first_s=first_s)
        yield lambda far: lines.show(far.done_bytes, far.total_bytes)
        return
    with _bars() as bars:
        task = bars.add_task(f"loading {what}", total=None)

        def show(far: RankLoading) -> None:
            bars.update(task, completed=far.done_bytes, total=far.total_bytes, refresh=True)

        yield show


class NodesView:
    """Shows what several nodes do: their lines, each under its node's name, and how far they have
    loaded.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Lines] = {}
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def on_event(self, name: str, event: NodeEvent) -> None:
        """Something has happened to a node."""
        if isinstance(event, Said):
            node_line(name, event.line)
        elif self._bars is not None:
            self._draw(self._bars, name, event)
        elif isinstance(event, Started):
            self._lines[name] = _Lines(lambda line: node_line(name, line), first_s=0.0)
        elif isinstance(event, Loading):
            self._lines[name].show(event.done_bytes, event.total_bytes)

    def on_note(self, name: str, text: str) -> None:
        """What the supervisor does about a node."""
        status_line(f"the {name} node {text}")

    @contextlib.asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Until its end, bars stand below the lines, on a terminal."""
        if not _draws():
            yield
            return
        with _bars() as bars:
            self._bars = bars
            drawing = asyncio.create_task(_keep_drawing(bars))
            try:
                yield
            finally:
                drawing.cancel()
                self._bars = None

    def _draw(self, bars: Progress, name: str, event: NodeEvent) -> None:
        match event:
            case Started():
                self._tasks[name] = bars.add_task(f"{name} starts", total=None)
                # In case that it is started again, when no bars are there any more.
                self._lines[name] = _Lines(lambda line: node_line(name, line), first_s=0.0)
            case Loading(done_bytes=done_bytes, total_bytes=total_bytes):
                state = "is loaded" if done_bytes >= total_bytes else "loads"
                bars.update(
                    self._tasks[name],
                    description=f"{name} {state}",
                    completed=done_bytes,
                    total=total_bytes,
                )
            case Ready():
                bars.update(self._tasks[name], description=f"{name} serves")
                bars.stop_task(self._tasks[name])


def _draws() -> bool:
    return sys.stderr.isatty() and not is_json()


def _bars() -> Progress:
    """Without a thread of its own: a supervisor forks."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
    )


async def _keep_drawing(bars: Progress) -> None:
    while True:
        bars.refresh()
        await asyncio.sleep(_DRAW_S)


def _amount(done_bytes: int, total_bytes: int) -> str:
    unit, size = ("GiB", 1 << 30) if total_bytes >= 1 << 30 else ("MiB", 1 << 20)
    return f"{done_bytes / size:,.1f} of {total_bytes / size:,.1f} {unit}"
