"""The simulated network: nodes, endpoints, and what is on its way between them. The adversary.

It does what the measured providers were seen to do, in the worst order that the seed finds:
    - writes land in any order, each after a delay of its own; a write's immediate comes after its
      own bytes and says nothing of other writes;
    - on "tcp" a completion means that the bytes were taken, and may come before they land; on "shm"
      the target pulls, so completions come after the landing, and a peer that was killed raises no
      error at all;
    - after a reset, writes reported good may never arrive, and writes reported failed may arrive;
    - closing an endpoint is the only thing that stops what is on its way to it.
Nothing is ever duplicated, and no bytes are altered: the providers rule that out.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from pdx.fabric.interface import Provider
from pdx.lab.simulated_fabric.conditions import Clock, Conditions
from pdx.lab.simulated_fabric.imm import ImmLayout
from pdx.lab.simulated_fabric.link import Link, Operation, OpKind
from pdx.lab.simulated_fabric.memory import AddressSpace
from pdx.lab.simulated_fabric.nodes import Endpoint, Flight, Landing, Node, Path
from pdx.lab.simulated_fabric.transfer import Range, WriteShape

if TYPE_CHECKING:
    from pdx.lab.simulated_fabric.worker import Worker

__all__ = ["SimulatedNetwork"]


class SimulatedNetwork:
    """One machine room. Everything random comes from ``rng``, all time from ``clock``: the same
    seed gives the same history.
    """

    def __init__(
        self,
        rng: random.Random,
        clock: Clock,
        *,
        conditions: Conditions | None = None,
        imm_layout: ImmLayout | None = None,
        write_shape: WriteShape | None = None,
    ) -> None:
        self.conditions = conditions or Conditions()
        self.imm_layout = imm_layout or ImmLayout()
        self.write_shape = write_shape
        self.memory = AddressSpace()
        #: Called at each landing of pages.
        self.on_landing: Callable[[Landing], None] | None = None
        #: Virtual time.
        self.now_ns: Callable[[], int] = clock.now_ns
        self._rng = rng
        self._call_at = clock.call_at
        self._random = rng.random
        self._nodes: dict[str, Node] = {}
        self._endpoints: dict[bytes, Endpoint] = {}
        self._paths: dict[tuple[str, str], Path] = {}
        self._gone: dict[bytes, list[Callable[[], None]]] = {}
        self._next_id = 1

    # ---- for workers ----------------------------------------------------------------------------

    def draw_worker_ns(self) -> int:
        """How long a thread takes to notice something."""
        return self._draw(self.conditions.worker_ns)

    def take_id(self) -> int:
        """A number that nothing else in this room has."""
        self._next_id += 1
        return self._next_id - 1

    def take_key(self) -> int:
        """64 random bits."""
        return self._rng.getrandbits(64)

    def defer(self, node: Node, delay_ns: int, callback: Callable[..., None], *args: Any) -> None:
        """Run a callback in a node later: when it is resumed, if it is stopped then, and never if
        it is dead.
        """
        self._call_at(self.now_ns() + delay_ns, self._run_in, node, callback, *args)

    def add_endpoint(
        self, node: Node, provider: Provider, worker: Worker, link: Link, domain: int
    ) -> Endpoint:
        """A place on the network, open at once."""
        endpoint = Endpoint(f"sim-{self.take_id()}".encode(), node, provider, worker, link, domain)
        self._endpoints[endpoint.name] = endpoint
        node.endpoints.append(endpoint)
        return endpoint

    def when_gone(self, name: bytes, callback: Callable[[], None]) -> None:
        """Call once the endpoint is closed or its process is dead."""
        if name in self._endpoints:
            self._gone.setdefault(name, []).append(callback)
        else:
            callback()

    def owner(self, name: bytes) -> Node | None:
        """The living process that has this endpoint."""
        endpoint = self._endpoints.get(name)
        return None if endpoint is None else endpoint.node

    def post(self, source: Endpoint, operation: Operation) -> bool:
        """Take an operation. False: refused for the moment."""
        if self._random() < self.conditions.refusal_rate:
            return False
        target = self._endpoints.get(source.link.peer_ends[operation.lane.peer].name)
        if target is None or source.broken:
            if source.provider == Provider.TCP:
                delay_ns = self._draw(self.conditions.completion_ns)
                complete = source.worker.on_complete
                self.defer(source.node, delay_ns, complete, operation, errno.ECONNRESET)
            return True
        path = self._path(source.node.name, target.node.name)
        flight = Flight(source, target, operation, path)
        source.outbound[flight] = None
        target.inbound[flight] = None
        self._call_at(self._landing_ns(flight), self._land, flight)
        # Small ones are injected: their bytes are taken at once.
        if source.provider == Provider.TCP or operation.kind is not OpKind.WRITE:
            self._report_later(flight)
        return True

    def close_all(self, node: Node, worker: Worker) -> None:
        """Close every endpoint of a worker."""
        for endpoint in list(node.endpoints):
            if endpoint.worker is worker:
                self.close(endpoint)

    def close(self, endpoint: Endpoint) -> None:
        """Nothing lands in it from here on. The fence."""
        if endpoint.closed:
            return
        endpoint.closed = True
        del self._endpoints[endpoint.name]
        endpoint.node.endpoints.remove(endpoint)
        for flight in list(endpoint.inbound):
            self._lose(flight)
            # The writer hears of some at once, and of the rest from what it posts next.
            heard = endpoint.provider == Provider.TCP and not self._is_cut(flight)
            if heard and self._choose(None):
                flight.code = flight.code or errno.ECONNRESET
                self._report_later(flight)
        if endpoint.provider == Provider.TCP:
            for flight in list(endpoint.outbound):
                # What was not read yet never will be; the rest is in the sockets.
                if flight.data is None or self._random() < 0.5:
                    self._lose(flight)
        elif endpoint.outbound:
            endpoint.node.pulled_from.append(endpoint)
        for callback in self._gone.pop(endpoint.name, []):
            callback()

    # ---- for whoever checks invariants ----------------------------------------------------------

    def pending_targets(self, name: str) -> Iterator[list[Range]]:
        """Where writes can still land in a node's regions: what is posted, and what is armed at the
        other ends of its open endpoints.
        """
        for endpoint in self.node(name).endpoints:
            for flight in endpoint.inbound:
                yield flight.targets()
            for end in endpoint.link.peer_ends:
                if (source := self._endpoints.get(end.name)) is not None:
                    yield from (target for _, target in source.link.armed_ranges())

    def pending_sources(self, name: str) -> Iterator[list[Range]]:
        """Where writes can still read a node's regions: what is posted and not read yet, and what
        is armed.
        """
        node = self.node(name)
        for endpoint in (*node.endpoints, *node.pulled_from):
            for flight in endpoint.outbound:
                if flight.data is None and not flight.lost:
                    yield flight.sources()
            yield from (source for source, _ in endpoint.link.armed_ranges())

    # ---- faults ---------------------------------------------------------------------------------

    def node(self, name: str) -> Node:
        """The living node of this name; a new one after a kill."""
        found = self._nodes.get(name)
        if found is None or found.dead:
            found = self._nodes[name] = Node(name, pid=self.take_id())
        return found

    def kill(self, name: str) -> None:
        """The process dies: SIGKILL. What it gave to the sockets may still arrive."""
        node = self.node(name)
        node.dead = True
        node.backlog.clear()
        for endpoint in list(node.endpoints):
            if endpoint.provider == Provider.SHM:
                for flight in list(endpoint.outbound):
                    self._lose(flight)
            self.close(endpoint)

    def pause(self, name: str) -> None:
        """The process is stopped: SIGSTOP."""
        node = self.node(name)
        if node.paused_at_ns is None:
            node.paused_at_ns = self.now_ns()

    def resume(self, name: str) -> None:
        """SIGCONT. Everything that waited happens now, in an order of the seed."""
        node = self.node(name)
        if node.paused_at_ns is None:
            return
        gap_ns = self.now_ns() - node.paused_at_ns
        node.paused_at_ns = None
        for worker in node.workers:
            worker.liveness.resumed(gap_ns)
        backlog, node.backlog = node.backlog, []
        for callback in backlog:
            self.defer(node, self._draw(self.conditions.worker_ns), callback)

    def cut(self, source: str, target: str, *, domain: int | None = None) -> None:
        """Nothing gets from source (from one of its domains) to target until mend(); what is on
        its way waits.
        """
        path = self._path(source, target)
        if domain is None:
            path.cut = True
        else:
            path.cut_domains.add(domain)

    def partition(self, one: str, other: str) -> None:
        """Cut both ways."""
        self.cut(one, other)
        self.cut(other, one)

    def mend(self, one: str, other: str) -> None:
        """The end of a partition: what waited for it goes on."""
        for ends in ((one, other), (other, one)):
            path = self._path(*ends)
            path.cut = False
            path.cut_domains.clear()
            held, path.held = path.held, []
            for flight in held:
                self._call_at(self._landing_ns(flight), self._land, flight)

    def slow(self, source: str, target: str, slowness: float) -> None:
        """Multiply the time that everything takes from source to target; 1 is normal."""
        self._path(source, target).slowness = slowness

    def reset(
        self,
        one: str,
        other: str,
        *,
        lost: bool | None = None,
        reported_failed: bool | None = None,
        reconnects: bool | None = None,
    ) -> None:
        """The TCP connections between two living nodes are reset.

        Args:
            lost: whether what is on its way arrives no more; None draws for each operation.
            reported_failed: whether the writer is told an error; None draws for each.
            reconnects: whether later operations get through; None draws for each link.
        """
        for endpoint in self._between(one, other):
            for flight in list(endpoint.outbound):
                if self._choose(reported_failed) and not flight.reported:
                    flight.code = errno.ECONNRESET
                if self._choose(lost):
                    self._lose(flight)
            if not self._choose(reconnects):
                endpoint.broken = True

    # ---- flights --------------------------------------------------------------------------------

    def _run_in(self, node: Node, callback: Callable[..., None], *args: Any) -> None:
        if node.dead:
            return
        if node.paused_at_ns is not None:
            node.backlog.append(partial(callback, *args))
        else:
            callback(*args)

    def _landing_ns(self, flight: Flight) -> int:
        path = flight.path
        start_ns = float(self.now_ns())
        write = flight.operation.write
        if write is not None and self.conditions.bytes_per_s is not None:
            rate = self.conditions.bytes_per_s / path.slowness
            start_ns = max(start_ns, path.busy_until_ns) + write.num_bytes / rate * 1e9
            path.busy_until_ns = start_ns
        return int(start_ns + self._draw(self.conditions.wire_ns) * path.slowness)

    def _land(self, flight: Flight) -> None:
        """The bytes arrive, if nothing keeps them."""
        if flight.lost:
            return
        source, target = flight.source, flight.target
        if self._is_cut(flight):
            flight.path.held.append(flight)
            return
        if target.node.paused_at_ns is not None:
            target.node.backlog.append(partial(self._land, flight))
            return
        if (
            flight.data is None
            and source.provider == Provider.TCP
            and source.node.paused_at_ns is not None
        ):
            source.node.backlog.append(partial(self._land, flight))
            return
        if flight.operation.kind is OpKind.WRITE:
            landing = flight.land(self.memory)
            if self.on_landing is not None:
                self.on_landing(landing)
        self.defer(target.node, self._draw(self.conditions.imm_ns), self._deliver, flight)

    def _deliver(self, flight: Flight) -> None:
        """The target's worker sees it."""
        if flight.lost:
            return
        flight.delivered = True
        self._forget(flight)
        operation, target = flight.operation, flight.target
        if operation.kind is OpKind.WRITE:
            if target.provider == Provider.SHM:
                self._report_later(flight)
            target.worker.on_imm(target.link, target.domain, operation.imm)
        elif operation.kind is OpKind.PROBE:
            target.worker.liveness.on_probe(target.link, operation.lane.index, operation.imm)
        else:
            lane = operation.lane.index
            target.worker.liveness.on_beat(target.link, lane, operation.tick, operation.reaped)

    def _report_later(self, flight: Flight) -> None:
        lossy = flight.operation.kind is OpKind.WRITE
        if lossy and self._random() < self.conditions.completion_loss_rate:
            return
        delay_ns = self._draw(self.conditions.completion_ns)
        self.defer(flight.source.node, delay_ns, self._report, flight)

    def _report(self, flight: Flight) -> None:
        """The writer's worker is told."""
        if flight.reported:
            return
        flight.reported = True
        if not flight.lost:
            flight.read(self.memory)
        self._forget(flight)
        flight.source.worker.on_complete(flight.operation, flight.code)

    def _lose(self, flight: Flight) -> None:
        flight.lost = True
        self._forget(flight)

    def _forget(self, flight: Flight) -> None:
        """Endpoints remember a flight as long as a fault could still change it."""
        if flight.lost or flight.delivered:
            flight.target.inbound.pop(flight, None)
            if flight.reported:
                flight.source.outbound.pop(flight, None)

    def _between(self, one: str, other: str) -> list[Endpoint]:
        found = []
        for name, peer_name in ((one, other), (other, one)):
            for endpoint in self.node(name).endpoints:
                owners = [self.owner(end.name) for end in endpoint.link.peer_ends]
                joined = any(owner and owner.name == peer_name for owner in owners)
                if endpoint.provider == Provider.TCP and joined:
                    found.append(endpoint)
        return found

    def _is_cut(self, flight: Flight) -> bool:
        path = flight.path
        return path.cut or flight.source.domain in path.cut_domains

    def _path(self, source: str, target: str) -> Path:
        path = self._paths.get((source, target))
        if path is None:
            path = self._paths[source, target] = Path()
        return path

    def _choose(self, wanted: bool | None) -> bool:
        return self._random() < 0.5 if wanted is None else wanted

    def _draw(self, bounds: tuple[int, int]) -> int:
        low, high = bounds
        return low + int(self._random() * (high - low + 1))
