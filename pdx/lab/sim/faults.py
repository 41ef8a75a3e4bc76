"""Makes a scenario's faults happen to a history's room."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, assert_never

from pdx.lab.sim.scenario import Fault, FaultKind
from pdx.lab.simulated_fabric import Imm

if TYPE_CHECKING:
    from pdx.lab.sim.cluster import RunningNode
    from pdx.lab.sim.history import History

__all__ = ["FaultDriver"]


class FaultDriver:
    """Begins faults, and ends them after their time."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._rng = random.Random(f"{history.scenario.seed}/faults")
        #: Faults under way that let immediates stray.
        self._num_stray = 0

    def begin(self, fault: Fault) -> None:
        """A fault's time has come."""
        if fault.kind is not FaultKind.ABORT:
            self._history.end_calm()
        self._history.note("fault", str(fault))
        end = self._begin(fault)
        if end is not None:
            loop = self._history.loop
            loop.call_at_ns(loop.now_ns + fault.duration_ns, self._end, fault, end)

    def _end(self, fault: Fault, end: Callable[[], None]) -> None:
        self._history.note("fault", f"{fault.kind} {fault.target} is over")
        end()

    def _begin(self, fault: Fault) -> Callable[[], None] | None:
        """Do it; what ends it, if anything is to be ended."""
        history = self._history
        match fault.kind:
            case FaultKind.KILL:
                return self._kill(fault.target)
            case FaultKind.RESTART:
                return self._restart(fault.target)
            case FaultKind.RANK:
                return self._kill_rank(fault.target)
            case FaultKind.PAUSE:
                return self._pause(fault.target)
            case FaultKind.PARTITION:
                return self._partition(fault)
            case FaultKind.CARD:
                return self._cut_card(fault)
            case FaultKind.SLOW:
                return self._slow(fault.target, fault.other, 1 + 200 * fault.strength**3)
            case FaultKind.REORDER:
                wide = (0, int(200e6 * fault.strength**2))
                return self._conditions(wire_ns=wide, imm_ns=(0, wide[1] // 2))
            case FaultKind.LOSE:
                return self._conditions(completion_loss_rate=fault.strength / 2)
            case FaultKind.LATE:
                return self._conditions(completion_ns=(0, int(3e9 * fault.strength**2)))
            case FaultKind.REFUSE:
                return self._conditions(refusal_rate=0.3 + 0.69 * fault.strength)
            case FaultKind.RESET:
                self._reset(fault)
            case FaultKind.HANGUP:
                history.control.hang_up(fault.target, fault.other, half=fault.strength < 0.5)
            case FaultKind.STRAY:
                return self._let_stray()
            case FaultKind.ABORT:
                self._abort(int(fault.target))
            case FaultKind.PAGES:
                pass  # the nodes were made with few
            case _:
                assert_never(fault.kind)
        return None

    def _kill(self, name: str) -> Callable[[], None] | None:
        running = self._history.nodes[name]
        if running.process.dead:
            return None
        self._history.kill_node(name)
        return partial(self._start_again, running)

    def _restart(self, name: str) -> Callable[[], None] | None:
        """A clean stop; the process is gone when its node has stopped, or at the fault's end."""
        running = self._history.nodes[name]
        if running.process.dead or running.process.paused:
            return None
        running.stop()
        return partial(self._start_again, running)

    def _kill_rank(self, name: str) -> Callable[[], None] | None:
        """The node must end by itself; its process is gone then, or at the fault's end."""
        running = self._history.nodes[name]
        if running.process.dead or running.process.paused or not running.lose_rank():
            return None
        return partial(self._start_again, running)

    def _start_again(self, running: RunningNode) -> None:
        """Unless another fault's end has done so."""
        if not running.process.dead:
            self._history.kill_node(running.name)
        if self._history.nodes[running.name] is running:
            self._history.start_node(running.name)

    def _pause(self, name: str) -> Callable[[], None] | None:
        history, process = self._history, self._history.nodes[name].process
        if process.dead or process.paused:
            return None
        history.network.pause(name)
        history.loop.pause(process)

        def resume() -> None:
            if not process.dead:
                history.network.resume(name)
                history.loop.resume(process)

        return resume

    def _partition(self, fault: Fault) -> Callable[[], None]:
        """Both ways and both kinds of traffic, or a part of it: a link that is half open."""
        one, other = fault.target, fault.other
        network, control = self._history.network, self._history.control
        part = int(fault.strength * 6)
        if part != 1:
            network.cut(one, other)
        if part != 2:
            control.cut(one, other)
        if part != 3:
            network.cut(other, one)
        if part != 4:
            control.cut(other, one)

        def mend() -> None:
            network.mend(one, other)
            control.mend(one, other)

        return mend

    def _cut_card(self, fault: Fault) -> Callable[[], None]:
        """One of the cards, both ways or one way; where it is the only one the data path is cut."""
        one, other = fault.target, fault.other
        network = self._history.network
        for source, target in ((one, other), (other, one))[: 1 + int(fault.strength * 2)]:
            card = int(fault.strength * 97) % self._history.scenario.nodes[source].num_cards
            network.cut(source, target, domain=card)
        return partial(network.mend, one, other)

    def _slow(self, one: str, other: str, slowness: float) -> Callable[[], None]:
        def set_to(factor: float) -> None:
            self._history.network.slow(one, other, factor)
            self._history.control.slow(one, other, factor)

        set_to(slowness)
        return partial(set_to, 1.0)

    def _reset(self, fault: Fault) -> None:
        """All that is reported failed arrives, or nothing of what is reported good, or a mix."""
        lies = {0: (False, True, True), 1: (True, False, True)}
        kind = lies.get(int(fault.strength * 4), (None, None, None))
        lost, reported_failed, reconnects = kind
        self._history.network.reset(
            fault.target,
            fault.other,
            lost=lost,
            reported_failed=reported_failed,
            reconnects=reconnects,
        )

    def _conditions(self, **changes: object) -> Callable[[], None]:
        network = self._history.network
        before = network.conditions
        normal = {name: getattr(before, name) for name in changes}
        network.conditions = replace(before, **changes)  # type: ignore[arg-type]

        def restore() -> None:
            network.conditions = replace(network.conditions, **normal)

        return restore

    def _let_stray(self) -> Callable[[], None]:
        self._num_stray += 1

        def enough() -> None:
            self._num_stray -= 1

        return enough

    def on_slot_reused(self, node: str, slot: int, before: int) -> None:
        """A transfer begins in a slot that had another generation before."""
        if self._num_stray:
            loop = self._history.loop
            delay_ns = self._rng.randrange(3_000_000)
            loop.call_at_ns(loop.now_ns + delay_ns, self._stray, node, Imm(slot, before, 1))

    def _stray(self, node: str, imm: Imm) -> None:
        for worker in self._history.network.node(node).workers:
            self._history.note(node, f"a stray immediate comes: {imm}")
            if not worker.slots.credit(imm, self._history.loop.now_ns):
                worker.count("stale_imms")

    def _abort(self, number: int) -> None:
        client = self._history.clients.get(number)
        if client is None or client.submitted_ns is None:
            return
        frontend = self._history.nodes[client.plan.decoder].frontend
        if frontend is not None:
            frontend.abort(client)
