"""One history: a scenario that runs until it is at rest, or until an invariant is broken."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from pdx.errors import WorkerError
from pdx.lab.sim.clients import Client, End
from pdx.lab.sim.cluster import NUM_LAYERS, ClockOfLoop, Room, RunningNode
from pdx.lab.sim.faults import FaultDriver
from pdx.lab.sim.loop import Process, VirtualLoop
from pdx.lab.sim.model import SimulatedModel
from pdx.lab.sim.scenario import Scenario
from pdx.lab.sim.watch import BrokenInvariant
from pdx.lab.sim.wire import ControlNetwork
from pdx.lab.simulated_fabric import Conditions, ImmLayout, Landing, SimulatedNetwork

__all__ = ["History", "Outcome"]

_CONTROL_DELAY_NS = (20_000, 400_000)
#: A request ends so long after its submission, or after the last fault is over.
_BOUND_NS = 40_000_000_000
#: When all have ended, everything comes to rest in this time.
_REST_NS = 30_000_000_000
_QUIET_NS = 500_000_000
_START_NS = 50_000_000
#: Fields of messages that differ from process to process.
_NOT_THE_SEEDS = frozenset({"node", "pid", "host"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a history went."""

    seed: int
    broken: BrokenInvariant | None
    ends: dict[str, int]
    errors: dict[str, int]
    virtual_s: float
    cpu_s: float
    num_steps: int
    counters: dict[str, int]
    lines: list[str] = field(default_factory=list)


class History:
    """See the module's docstring. Run it once.

    Args:
        recorded: keep what happened as lines of text.
    """

    def __init__(self, scenario: Scenario, *, recorded: bool = False) -> None:
        self.scenario = scenario
        self.broken: BrokenInvariant | None = None
        self.lines: list[str] = []
        self._recorded = recorded
        self.loop = VirtualLoop(self._on_error)  # type: ignore[abstract]  # what nobody calls is not there
        rng = random.Random(f"{scenario.seed}/network")
        self.network = SimulatedNetwork(
            rng,
            ClockOfLoop(self.loop),
            conditions=Conditions(),
            imm_layout=ImmLayout(slot_bits=scenario.slot_bits, generation_bits=scenario.slot_bits),
        )
        self.network.on_landing = self._on_landing
        self.control = ControlNetwork(
            self.loop,
            random.Random(f"{scenario.seed}/control"),
            delay_ns=_CONTROL_DELAY_NS,
            sent=self._on_sent if recorded else None,
        )
        self.loop.control = self.control
        self.room = Room(
            scenario=scenario,
            loop=self.loop,
            network=self.network,
            control=self.control,
            model=SimulatedModel(
                num_layers=NUM_LAYERS,
                num_kv_heads=scenario.num_kv_heads,
                context_len=scenario.context_len,
            ),
            broken=self.on_broken,
            on_slot_reused=self._on_slot_reused,
        )
        #: The living node of each name.
        self.nodes: dict[str, RunningNode] = {}
        self.clients = {
            plan.number: Client(
                plan, self.room.model, self.note, self.on_broken, self._on_client_end
            )
            for plan in scenario.requests
        }
        self._lives: Counter[str] = Counter()
        self._processes: list[Process] = []
        self._faults = FaultDriver(self)
        #: No fault has begun that could do harm.
        self._calm = True
        self._num_open = len(self.clients)

    # ---- running --------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run it; never raises for a broken invariant."""
        start_s = time.process_time()
        for name in self.scenario.nodes:
            self.start_node(name)
        for client in self.clients.values():
            self.loop.call_at_ns(_START_NS + client.plan.at_ns, self._submit, client)
        for fault in self.scenario.faults:
            self.loop.call_at_ns(_START_NS + fault.at_ns, self._faults.begin, fault)
        last_ns = max((f.end_ns for f in self.scenario.faults), default=0)
        last_ns = max([last_ns, *(plan.at_ns for plan in self.scenario.requests)]) + _START_NS
        with contextlib.suppress(BrokenInvariant):
            self._run_to_end(last_ns)
        outcome = self._outcome(time.process_time() - start_s)
        self.network.on_landing = None
        self._recorded = False
        self.loop.dispose(self._processes)
        return outcome

    def _run_to_end(self, last_ns: int) -> None:
        self.loop.run_until(last_ns, self._stopped)
        self._check()
        self.loop.run_until(last_ns + _BOUND_NS, self._all_ended)
        self._check()
        for client in self.clients.values():
            if client.end is None:
                self.on_broken(
                    "bounded", f"{client.name} has not ended {_BOUND_NS / 1e9:g} s after"
                )
        self._check()
        self.end_calm()
        deadline_ns = self.loop.now_ns + _REST_NS
        self.loop.run_until(deadline_ns, lambda: self.broken is not None or not self._unrest())
        self._check()
        unrest = self._unrest()
        if unrest:
            self.on_broken("at-rest", unrest)
        self._check()
        # Whoever is at rest does nothing, too.
        self.loop.run_until(self.loop.now_ns + _QUIET_NS, self._stopped)
        self._check()

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken

    def _stopped(self) -> bool:
        return self.broken is not None

    def _all_ended(self) -> bool:
        return self.broken is not None or self._num_open == 0

    def _unrest(self) -> str:
        """What is not at rest; empty: everything is."""
        for name, running in self.nodes.items():
            counts = running.counts()
            if not counts:
                return f"{name} has not started"
            busy = ("leased", "in_flight", "filled", "quarantined")
            names = [f"pages_{state}" for state in busy]
            names += ["requests_waiting", "requests_active", "transfers_open", "slots_taken"]
            left = {key: counts[key] for key in names if counts.get(key)}
            if left:
                return f"{name}: {left}"
        return ""

    def _on_client_end(self) -> None:
        self._num_open -= 1

    def _submit(self, client: Client) -> None:
        running = self.nodes[client.plan.decoder]
        frontend = running.frontend
        listens = frontend is not None and frontend.open and not running.process.dead
        client.submit(frontend if listens else None, self.loop.now_ns)

    def _on_slot_reused(self, node: str, slot: int, before: int) -> None:
        self._faults.on_slot_reused(node, slot, before)

    def end_calm(self) -> None:
        """The first fault begins, or all has ended without one."""
        if not self._calm:
            return
        self._calm = False
        for running in self.nodes.values():
            if running.decoder is not None:
                counts = running.decoder.status().counts
                if counts["imms_stale"]:
                    self.on_broken(
                        "calm", f"{running.name}: {counts['imms_stale']} immediates are stale"
                    )
            if running.links_down():
                self.on_broken("calm", f"{running.name} has lost a link")

    # ---- nodes come and go ----------------------------------------------------------------

    def start_node(self, name: str) -> None:
        """A new process of this name; the one before is dead."""
        assert name not in self.nodes or self.nodes[name].process.dead
        self._lives[name] += 1
        running = RunningNode(self.room, name, self._lives[name])
        self.nodes[name] = running
        self._processes.append(running.process)
        running.task.add_done_callback(lambda task: self._on_node_end(running))

    def kill_node(self, name: str) -> None:
        """The process dies, with its connections and endpoints."""
        running = self.nodes[name]
        running.process.dead = True
        self.network.kill(name)
        self.control.kill(running.process)
        if running.frontend is not None:
            running.frontend.close()

    def _on_node_end(self, running: RunningNode) -> None:
        if running.process.dead or running.task.cancelled() or self.loop.is_closed():
            return
        error = running.task.exception()
        if running.has_lost_rank and isinstance(error, WorkerError):
            self.note(running.name, f"has ended: {error.message}")
            self.kill_node(running.name)
            return
        self.on_broken("no-crash", f"{running.name} has ended: {error!r}")

    # ---- what is told ---------------------------------------------------------------------

    def note(self, who: str, what: str) -> None:
        """A line of history."""
        if self._recorded:
            self.lines.append(f"{self.loop.now_ns / 1e6:12.3f} ms  {who:<8} {what}")

    def on_broken(self, invariant: str, detail: str) -> None:
        """What must not happen has happened: the first counts."""
        if self.broken is None:
            self.note("BROKEN", f"{invariant}: {detail}")
            self.broken = BrokenInvariant(invariant, detail)

    def _on_error(self, process: Process | None, what: str) -> None:
        who = "the room" if process is None else process.name
        self.on_broken("no-crash", f"{who}: {what}")

    def _on_landing(self, landing: Landing) -> None:
        running = self.nodes[landing.target_node]
        if running.watch is not None:
            running.watch.on_landing(landing)
        if self._recorded:
            self.note(
                landing.target_node, f"{landing.write.atoms} atoms of {landing.source_node} land"
            )

    def _on_sent(self, source: str, target: str, data: bytes) -> None:
        self.note(source, f"-> {target}: {describe(data)}")

    def _outcome(self, cpu_s: float) -> Outcome:
        ends = Counter(str(c.end or "open") for c in self.clients.values())
        errors = Counter(c.error for c in self.clients.values() if c.end is End.FAILED)
        counters: Counter[str] = Counter()
        for running in self.nodes.values():
            counters.update(
                {k: v for k, v in running.counts().items() if not k.startswith("pages")}
            )
        return Outcome(
            seed=self.scenario.seed,
            broken=self.broken,
            ends=dict(ends),
            errors=dict(errors),
            virtual_s=self.loop.now_ns / 1e9,
            cpu_s=cpu_s,
            num_steps=self.loop.num_steps,
            counters=dict(counters),
            lines=self.lines,
        )


def describe(data: bytes) -> str:
    """A control frame in words."""
    import msgspec

    try:
        message = msgspec.msgpack.decode(data[4:])
    except msgspec.DecodeError:
        return f"{len(data)} bytes"
    kind = message.pop("type", "?")
    short = {
        key: value
        for key, value in message.items()
        if isinstance(value, int | str) and value and key not in _NOT_THE_SEEDS
    }
    return f"{kind} {short}"
