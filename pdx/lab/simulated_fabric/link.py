"""One link as its worker sees it: state, credit, liveness, what is in flight. Pure.

    open ──connect──> connecting ──both probes──> up
                          └── an error, no beat, no connection in time ──> down   (from up as well)

fence() ends any of them. Credit is the receiver's, for each of its domains: immediates that were
posted and that the peer has not said it counted stay within its window, whatever the local
completions say.

With n domains here and m there, a link has max(n, m) lanes: lane i joins our domain i % n with the
peer's i % m. Both sides number them alike. Each lane is probed and beats, and is needed.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdx.fabric.descriptor import LinkAddress
from pdx.lab.simulated_fabric.region import Region
from pdx.lab.simulated_fabric.transfer import Range, Transfer, Write

__all__ = ["Lane", "Link", "LinkState", "OpKind", "Operation", "OwnEnd", "PeerEnd"]

_MAX_WRITES_IN_FLIGHT = 240
_MAX_BYTES_IN_FLIGHT = 32 << 20


class LinkState(enum.Enum):
    """See the module's drawing."""

    OPEN = enum.auto()
    CONNECTING = enum.auto()
    UP = enum.auto()
    DOWN = enum.auto()


class OpKind(enum.Enum):
    """What an operation carries."""

    WRITE = enum.auto()
    PROBE = enum.auto()
    BEAT = enum.auto()


@dataclass(slots=True, eq=False)
class Operation:
    """One operation that the network holds."""

    kind: OpKind
    #: None: its link was fenced, so its completion concerns nobody.
    link: Link | None
    lane: Lane
    write: Write | None = None
    transfer: Transfer | None = None
    imm: int = 0
    #: A beat's content.
    tick: int = 0
    reaped: int = 0


@dataclass(slots=True, eq=False)
class OwnEnd:
    """A link in one of our domains: our peer's credit there."""

    reaped: int = 0
    reported_reaped: int = 0
    writes_in_flight: int = 0


@dataclass(slots=True, eq=False)
class PeerEnd:
    """A link in one of the peer's domains: our credit there."""

    name: bytes
    posted_imms: int = 0
    reaped: int = 0


@dataclass(slots=True, eq=False)
class Lane:
    """One way from a domain of ours to one of the peer's."""

    index: int
    own: int
    peer: int
    probe_completed: bool = False
    peer_probed: bool = False
    tick: int = 0
    peer_tick: int = 0
    last_life_ns: int = 0
    beats_in_flight: int = 0
    bytes_in_flight: int = 0
    #: Since when the network takes no write of ours; None: it does.
    blocked_since_ns: int | None = None


@dataclass(slots=True, eq=False)
class Link:
    """See the module."""

    id: int
    region: Region
    #: Immediates that the peer may have on their way to each of our domains.
    window: int
    probe_tag: int
    own: list[OwnEnd]
    state: LinkState = LinkState.OPEN
    peer: LinkAddress | None = None
    peer_ends: list[PeerEnd] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)
    #: The lanes of each of our domains.
    lanes_of: list[list[Lane]] = field(init=False)
    next_lane: int = 0
    #: Probes that came before we knew the peer.
    early_probes: set[int] = field(default_factory=set)

    writes_in_flight: int = 0
    #: In order of posting (a dict, because a set's order is not the seed's).
    operations: dict[Operation, None] = field(default_factory=dict)
    transfers: dict[int, Transfer] = field(default_factory=dict)
    #: Transfers with layers to post, in turn.
    ready: deque[Transfer] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.lanes_of = [[] for _ in self.own]

    def set_peer(self, peer: LinkAddress) -> None:
        """What connect() was given."""
        self.peer = peer
        self.peer_ends = [PeerEnd(end.name) for end in peer.ends]
        self.lanes = [
            Lane(i, i % len(self.own), i % len(peer.ends), peer_probed=i in self.early_probes)
            for i in range(max(len(self.own), len(peer.ends)))
        ]
        self.lanes_of = [
            [lane for lane in self.lanes if lane.own == domain] for domain in range(len(self.own))
        ]

    def armed_ranges(self) -> Iterator[tuple[list[Range], list[Range]]]:
        """What each batch of our transfers reads here, and what it writes at the peer."""
        for transfer in self.transfers.values():
            for batch in transfer.batches:
                yield batch.ranges()

    def take_lane(self, refused: set[int]) -> Lane | None:
        """The next lane in turn whose credit and limits allow one more write, but the refused."""
        for _ in self.lanes:
            lane = self.lanes[self.next_lane]
            self.next_lane = (self.next_lane + 1) % len(self.lanes)
            if lane.index not in refused and self._may_write(lane):
                return lane
        return None

    def _may_write(self, lane: Lane) -> bool:
        assert self.peer is not None
        end = self.peer_ends[lane.peer]
        return (
            self.own[lane.own].writes_in_flight < _MAX_WRITES_IN_FLIGHT
            and lane.bytes_in_flight < _MAX_BYTES_IN_FLIGHT
            and end.posted_imms - end.reaped < self.peer.window
        )

    def on_probe(self, index: int) -> None:
        """The peer's probe of one lane landed."""
        if self.peer is None:
            self.early_probes.add(index)
        elif index < len(self.lanes):
            self.lanes[index].peer_probed = True

    def on_beat(self, index: int, tick: int, reaped: int, now_ns: int) -> bool:
        """A beat of the peer landed. False: it is older than one that landed before."""
        lane = self.lanes[index]
        if tick <= lane.peer_tick:
            return False
        lane.peer_tick = tick
        lane.last_life_ns = now_ns
        # A peer that claims more than was posted would lift the limit on what may be in flight.
        end = self.peer_ends[lane.peer]
        if end.reaped < reaped <= end.posted_imms:
            end.reaped = reaped
        return True

    def on_imm(self, domain: int, now_ns: int) -> None:
        """An immediate of the peer was read from a domain's queue."""
        self.own[domain].reaped += 1
        lanes = self.lanes_of[domain]
        # Where several lanes lead into one domain, nobody knows which one brought it.
        if len(lanes) == 1:
            lanes[0].last_life_ns = now_ns

    def beat_owed(self, domain: int) -> bool:
        """Whether the peer should be told now what was counted."""
        end = self.own[domain]
        return end.reaped - end.reported_reaped >= max(1, self.window // 2)

    def took(self, operation: Operation) -> None:
        """The network took an operation."""
        self.operations[operation] = None
        if operation.write is not None:
            self.peer_ends[operation.lane.peer].posted_imms += 1
            self.own[operation.lane.own].writes_in_flight += 1
            self.writes_in_flight += 1
            operation.lane.bytes_in_flight += operation.write.num_bytes

    def gave_back(self, operation: Operation) -> None:
        """The network gave an operation back."""
        del self.operations[operation]
        if operation.write is not None:
            self.own[operation.lane.own].writes_in_flight -= 1
            self.writes_in_flight -= 1
            operation.lane.bytes_in_flight -= operation.write.num_bytes
