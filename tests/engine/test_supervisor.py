"""The supervisor over a launcher of another kind than local: one that starts nothing, in a process
without children. What it does for real nodes is in tests/system/test_serve.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from pdx.engine.launcher import Ended, Ending, NodeEvent, NodeSpec, Said, Started
from pdx.engine.node_report import Loading, Ready
from pdx.engine.restarts import RestartPolicy
from pdx.engine.supervisor import Supervisor
from pdx.errors import WorkerError

#: Pauses that are over at once.
POLICY = RestartPolicy(most=3, first_pause_s=0.0)
ENDED = Ended(pid=7, how="exited with code 1", last_lines=("out of luck",))


def spec(name: str, stage: int = 0) -> NodeSpec:
    return NodeSpec(
        name=name,
        role="prefill",
        arguments=("prefill",),
        env={"PDX_MODEL": "m"},
        address_variable="PDX_LISTEN",
        stage=stage,
    )


class Stage:
    """A launcher whose nodes do what the test says."""

    def __init__(self, first: NodeEvent | None = None) -> None:
        self.calls: list[tuple[str, str]] = []
        self.specs: list[NodeSpec] = []
        self._first = first
        self._events: asyncio.Queue[tuple[str, NodeEvent]] = asyncio.Queue()
        #: Set whenever a node has been replaced.
        self.replaced = asyncio.Event()
        #: Set when the supervisor has said what it does about a node.
        self.noted = asyncio.Event()

    async def start(self, spec: NodeSpec) -> None:
        self.calls.append(("start", spec.name))
        self._begin(spec)

    async def replace(self, spec: NodeSpec) -> None:
        self.calls.append(("replace", spec.name))
        self._begin(spec)
        self.replaced.set()

    def _begin(self, spec: NodeSpec) -> None:
        self.specs.append(spec)
        self.happens(spec.name, Started())
        self.happens(spec.name, self._first or Ready(address=f"{spec.name}:1"))

    async def stop(self, name: str, how: Ending, timeout_s: float) -> None:
        self.calls.append((how.name, name))
        self.happens(name, Said("goodbye"))
        self.happens(name, ENDED)

    async def watch(self) -> AsyncIterator[tuple[str, NodeEvent]]:
        while True:
            yield await self._events.get()

    def happens(self, name: str, event: NodeEvent) -> None:
        self._events.put_nowait((name, event))


Heard = list[tuple[str, NodeEvent]]


def play(
    scene: Callable[[Supervisor, Stage], Awaitable[None]], stage: Callable[[], Stage] = Stage
) -> Heard:
    """Run a scene, stop the supervisor, and return what it has told of."""
    heard: Heard = []

    async def run() -> None:
        launcher = stage()

        def on_event(name: str, event: NodeEvent) -> None:
            heard.append((name, event))

        def on_note(name: str, text: str) -> None:
            launcher.noted.set()

        supervisor = Supervisor(launcher, POLICY, on_event, on_note)
        try:
            async with asyncio.timeout(10):
                await scene(supervisor, launcher)
        finally:
            await supervisor.stop()

    asyncio.run(run())
    return heard


def test_nodes_of_a_stage_start_together_and_higher_stages_stop_first() -> None:
    async def scene(supervisor: Supervisor, launcher: Stage) -> None:
        assert await supervisor.start([spec("a"), spec("b")]) == ["a:1", "b:1"]
        assert await supervisor.start([spec("c", stage=1)]) == ["c:1"]
        await supervisor.stop()
        assert [name for _, name in launcher.calls] == ["a", "b", "c", "c", "a", "b"]
        assert launcher.calls[3:] == [("NOW", "c"), ("NOW", "a"), ("NOW", "b")]

    heard = play(scene)
    assert [name for name, event in heard if event == Said("goodbye")][:3] == ["c", "a", "b"]


def test_a_node_that_ends_comes_back_at_the_address_it_had() -> None:
    async def scene(supervisor: Supervisor, launcher: Stage) -> None:
        await supervisor.start([spec("a")])
        launcher.happens("a", ENDED)
        await launcher.replaced.wait()
        first, second = launcher.specs
        assert first.env == {"PDX_MODEL": "m"}
        assert second.env == {"PDX_MODEL": "m", "PDX_LISTEN": "a:1"}

    play(scene)


def test_a_node_that_ends_too_often_is_the_failure_with_its_last_words() -> None:
    async def scene(supervisor: Supervisor, launcher: Stage) -> None:
        await supervisor.start([spec("a"), spec("b")])
        for _ in range(POLICY.most):
            launcher.replaced.clear()
            launcher.happens("a", ENDED)
            await launcher.replaced.wait()
        launcher.happens("a", ENDED)
        with pytest.raises(WorkerError) as failure:
            await supervisor.run()
        assert "the a node (pid 7), restarted 3 times, exited with code 1" in str(failure.value)
        assert str(failure.value).endswith("out of luck")
        assert launcher.calls.count(("replace", "a")) == POLICY.most

    play(scene)


def test_a_node_that_ends_before_it_serves_is_not_started_again() -> None:
    async def scene(supervisor: Supervisor, launcher: Stage) -> None:
        with pytest.raises(WorkerError, match="the a node"):
            await supervisor.start([spec("a")])
        assert ("replace", "a") not in launcher.calls

    play(scene, lambda: Stage(first=ENDED))


def test_a_node_that_ends_while_all_are_stopped_stays_away() -> None:
    async def scene(supervisor: Supervisor, launcher: Stage) -> None:
        await supervisor.start([spec("a")])
        await supervisor.drain(1.0)
        assert launcher.calls == [("start", "a"), ("DRAIN", "a")]

    play(scene)


def test_a_node_in_its_pause_is_not_started_again_by_a_supervisor_that_stops() -> None:
    async def scene(supervisor: Supervisor, launcher: Stage) -> None:
        await supervisor.start([spec("a")])
        launcher.happens("a", ENDED)
        await launcher.noted.wait()
        await supervisor.stop()
        assert ("replace", "a") not in launcher.calls

    play(scene)


def test_a_broken_watch_is_the_failure() -> None:
    async def scene(supervisor: Supervisor, launcher: Stage) -> None:
        await supervisor.start([spec("a")])
        launcher.happens("nobody", Ready(address="x:1"))
        with pytest.raises(KeyError):
            await supervisor.run()

    play(scene)


def test_everything_that_happens_is_told_in_order() -> None:
    async def scene(supervisor: Supervisor, launcher: Stage) -> None:
        await supervisor.start([spec("a")])
        launcher.happens("a", Loading(done_bytes=1, total_bytes=2))
        launcher.happens("a", Said("hello"))

    heard = [event for _, event in play(scene)]
    assert heard[:2] == [Started(), Ready(address="a:1")]
    assert heard[2:5] == [Loading(done_bytes=1, total_bytes=2), Said("hello"), Said("goodbye")]
