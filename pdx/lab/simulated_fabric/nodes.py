"""What a simulated room consists of: nodes, endpoints, paths, and what is on its way.
SimulatedNetwork owns and changes all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pdx.fabric.interface import Provider
from pdx.lab.simulated_fabric.link import Link, Operation
from pdx.lab.simulated_fabric.memory import AddressSpace
from pdx.lab.simulated_fabric.transfer import Range, Write

if TYPE_CHECKING:
    from pdx.lab.simulated_fabric.worker import Worker

__all__ = ["Endpoint", "Flight", "Landing", "Node", "Path"]


class Landing(NamedTuple):
    """Bytes of one write have just landed: for whoever checks invariants."""

    source_node: str
    target_node: str
    #: The receiving fabric's link.
    target_link: int
    imm: int
    write: Write


@dataclass(slots=True, eq=False)
class Node:
    """A process that may stop or die. A restarted one is another Node of the same name."""

    name: str
    pid: int
    dead: bool = False
    paused_at_ns: int | None = None
    #: What would have run in it, or landed in it, while it is stopped.
    backlog: list[Callable[[], None]] = field(default_factory=list)
    endpoints: list[Endpoint] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    #: Closed ones from which a shm peer may still pull.
    pulled_from: list[Endpoint] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Endpoint:
    """One link's place on the network in one domain."""

    name: bytes
    node: Node
    provider: Provider
    worker: Worker
    link: Link
    #: Which of its fabric's.
    domain: int
    closed: bool = False
    #: Its connection was reset for good: nothing more gets through it.
    broken: bool = False
    outbound: dict[Flight, None] = field(default_factory=dict)
    inbound: dict[Flight, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Flight:
    """One operation between two endpoints."""

    source: Endpoint
    target: Endpoint
    operation: Operation
    path: Path
    #: The bytes, once they were read from the source.
    data: list[bytes] | None = None
    #: What the writer will be told.
    code: int = 0
    reported: bool = False
    delivered: bool = False
    lost: bool = False

    def read(self, memory: AddressSpace) -> None:
        """Take the source's bytes, as late as the provider may."""
        write = self.operation.write
        if self.data is None and write is not None:
            region, view = self.source.link.region, memory.view
            self.data = [
                bytes(view(region.address(offset, num_bytes), num_bytes))
                for offset, _, num_bytes in write.pieces
            ]

    def land(self, memory: AddressSpace) -> Landing:
        """A write's bytes come to their places."""
        source, target, write = self.source, self.target, self.operation.write
        self.read(memory)
        assert write is not None and self.data is not None
        region, view = target.link.region, memory.view
        for (_, offset, num_bytes), data in zip(write.pieces, self.data, strict=True):
            view(region.address(offset, num_bytes), num_bytes)[:] = data
        imm = self.operation.imm
        return Landing(source.node.name, target.node.name, target.link.id, imm, write)

    def sources(self) -> list[Range]:
        """What a write reads; of another operation nothing."""
        write = self.operation.write
        return [] if write is None else [(p.src_offset, p.num_bytes) for p in write.pieces]

    def targets(self) -> list[Range]:
        """What it writes."""
        write = self.operation.write
        return [] if write is None else [(p.dst_offset, p.num_bytes) for p in write.pieces]


@dataclass(slots=True)
class Path:
    """From one node to another."""

    cut: bool = False
    #: Domains of the source from which nothing gets through.
    cut_domains: set[int] = field(default_factory=set)
    slowness: float = 1.0
    busy_until_ns: float = 0.0
    held: list[Flight] = field(default_factory=list)
