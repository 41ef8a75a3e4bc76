"""Keeps the nodes of a deployment running: starts them in order, starts one that ended again, and
stops all in order. Runs on the event loop of `pdx serve`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pdx.engine.launcher import Ended, Ending, Launcher, NodeEvent, NodeSpec
from pdx.engine.node_report import Ready
from pdx.engine.restarts import RestartPolicy, Restarts
from pdx.errors import PdxError, WorkerError
from pdx.metrics.clock import now_s

__all__ = ["Supervisor"]

#: A node has this long to end by itself.
_STOP_S = 10.0
#: What an ended node has said is handed on within this time.
_LAST_WORDS_S = 1.0


class _Node:
    """What the supervisor knows of a node."""

    def __init__(self, spec: NodeSpec, policy: RestartPolicy) -> None:
        self.spec = spec
        self.restarts = Restarts(policy=policy)
        #: Its address, once it has served for the first time.
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        #: Set when its process has ended, and all that it has said is handed on.
        self.over = asyncio.Event()
        #: Starts it again after a pause.
        self.comeback: asyncio.Task[None] | None = None


class Supervisor:
    """Owns the nodes of a launcher.

    Args:
        on_event: told of everything that happens to a node, by name.
        on_note: told what the supervisor does about it, by name.
    """

    def __init__(
        self,
        launcher: Launcher,
        policy: RestartPolicy,
        on_event: Callable[[str, NodeEvent], None],
        on_note: Callable[[str, str], None],
    ) -> None:
        self._launcher = launcher
        self._policy = policy
        self._on_event = on_event
        self._on_note = on_note
        self._nodes: dict[str, _Node] = {}
        self._is_ending = False
        #: Why the nodes cannot go on.
        self._failure: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()
        # asyncio complains of a failure that nobody has asked for; one may come at the very end.
        self._failure.add_done_callback(lambda failure: failure.cancelled() or failure.exception())
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._watched)

    async def start(self, specs: Sequence[NodeSpec]) -> list[str]:
        """Start nodes side by side and wait until all serve; returns their addresses.

        Raises:
            WorkerError: one ended before it served, or an earlier node ended too often.
        """
        nodes = [_Node(spec, self._policy) for spec in specs]
        for node in nodes:
            self._nodes[node.spec.name] = node
            await self._launcher.start(node.spec)
        for node in nodes:
            either: list[asyncio.Future[Any]] = [self._failure, node.address]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
        return [node.address.result() for node in nodes]

    async def run(self) -> None:
        """Start nodes again that end, until one ends too often.

        Raises:
            WorkerError: which, and its last words.
        """
        await asyncio.shield(self._failure)

    async def drain(self, timeout_s: float) -> None:
        """Let all nodes finish what runs, stage by stage, and end."""
        await self._stop(Ending.DRAIN, timeout_s + _STOP_S)

    async def stop(self) -> None:
        """End all nodes, stage by stage; cancelled (a second Ctrl-C), kill them."""
        try:
            await self._stop(Ending.NOW, _STOP_S)
        finally:
            self._watching.cancel()
            await asyncio.wait([self._watching])
            self._failure.cancel()

    async def _stop(self, how: Ending, timeout_s: float) -> None:
        self._is_ending = True
        nodes = list(self._nodes.values())
        comebacks = [node.comeback for node in nodes if node.comeback is not None]
        for task in comebacks:
            task.cancel()
        try:
            if comebacks:
                await asyncio.wait(comebacks)
            for stage in sorted({node.spec.stage for node in nodes}, reverse=True):
                of_stage = [node for node in nodes if node.spec.stage == stage]
                await self._end(of_stage, how, timeout_s)
        except asyncio.CancelledError:
            await self._end(nodes, Ending.KILL, _STOP_S)
            raise

    async def _end(self, nodes: Sequence[_Node], how: Ending, timeout_s: float) -> None:
        names = [node.spec.name for node in nodes]
        await asyncio.gather(*(self._launcher.stop(name, how, timeout_s) for name in names))
        last_words = [asyncio.create_task(node.over.wait()) for node in nodes]
        _, pending = await asyncio.wait(last_words, timeout=_LAST_WORDS_S)
        for task in pending:
            task.cancel()

    async def _watch(self) -> None:
        async for name, event in self._launcher.watch():
            self._on_event(name, event)
            match event:
                case Ready(address=address):
                    self._serves(self._nodes[name], address)
                case Ended():
                    self._ended(self._nodes[name], event)

    def _watched(self, task: asyncio.Task[None]) -> None:
        """What breaks the watching ends the supervisor, which would see nothing any more."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)

    def _serves(self, node: _Node, address: str) -> None:
        node.restarts = node.restarts.ready(now_s())
        if node.address.done():
            self._on_note(node.spec.name, "serves again")
            return
        # Others know it by this address from now on.
        own = {node.spec.address_variable: address}
        node.spec = dataclasses.replace(node.spec, env={**node.spec.env, **own})
        node.address.set_result(address)

    def _ended(self, node: _Node, end: Ended) -> None:
        node.over.set()
        if self._is_ending:
            return
        name = node.spec.name
        node.restarts, pause_s = node.restarts.ended(now_s())
        # What has never served would hardly do so the next time.
        if pause_s is None or not node.address.done():
            self._fail(WorkerError(end.describe(name, node.restarts.count - 1)))
            return
        self._on_note(name, f"{end.how}; it is started again in {pause_s:g} s")
        node.comeback = asyncio.create_task(self._come_back(node, pause_s))

    async def _come_back(self, node: _Node, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        node.over.clear()
        try:
            await self._launcher.replace(node.spec)
        except (PdxError, OSError) as error:
            self._fail(WorkerError(f"the {node.spec.name} node cannot be started again: {error}"))

    def _fail(self, error: WorkerError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)
