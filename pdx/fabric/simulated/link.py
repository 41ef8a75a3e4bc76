"""One link as its worker sees it: state, credit, liveness, what is in flight. Pure.

    open ──connect──> connecting ──both probes──> up
                          └── an error, no beat, no connection in time ──> down   (from up as well)

fence() ends any of them. Credit is the receiver's: immediates that were posted and that the peer
has not said it counted stay within its window, whatever the local completions say.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from pdx.fabric.descriptor import LinkAddress
from pdx.fabric.simulated.transfer import Transfer, Write

__all__ = ["Link", "LinkState", "OpKind", "Operation", "Region"]

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
    write: Write | None = None
    transfer: Transfer | None = None
    imm: int = 0
    #: A beat's content.
    tick: int = 0
    reaped: int = 0


@dataclass(slots=True, eq=False)
class Region:
    """Registered memory."""

    id: int
    address: int
    num_bytes: int
    num_links: int = 0


@dataclass(slots=True, eq=False)
class Link:
    """See the module."""

    id: int
    region: Region
    #: Immediates that the peer may have on their way to us.
    window: int
    probe_tag: int
    state: LinkState = LinkState.OPEN
    peer: LinkAddress | None = None
    probe_completed: bool = False
    peer_probed: bool = False

    #: Credit for our writes, and for our peer's.
    posted_imms: int = 0
    peer_reaped: int = 0
    reaped: int = 0
    reported_reaped: int = 0

    tick: int = 0
    peer_tick: int = 0
    last_life_ns: int = 0
    beats_in_flight: int = 0
    #: Since when the network takes no write of ours; None: it does.
    blocked_since_ns: int | None = None

    writes_in_flight: int = 0
    bytes_in_flight: int = 0
    #: In order of posting (a dict, because a set's order is not the seed's).
    operations: dict[Operation, None] = field(default_factory=dict)
    transfers: dict[int, Transfer] = field(default_factory=dict)
    #: Transfers with layers to post, in turn.
    ready: deque[Transfer] = field(default_factory=deque)

    def may_write(self) -> bool:
        """Whether the credit and the limits of what is in flight allow one more write."""
        assert self.peer is not None
        return (
            self.writes_in_flight < _MAX_WRITES_IN_FLIGHT
            and self.bytes_in_flight < _MAX_BYTES_IN_FLIGHT
            and self.posted_imms - self.peer_reaped < self.peer.window
        )

    def on_beat(self, tick: int, reaped: int, now_ns: int) -> bool:
        """A beat of the peer landed. False: it is older than one that landed before."""
        if tick <= self.peer_tick:
            return False
        self.peer_tick = tick
        self.last_life_ns = now_ns
        # A peer that claims more than was posted would lift the limit on what may be in flight.
        if self.peer_reaped < reaped <= self.posted_imms:
            self.peer_reaped = reaped
        return True

    @property
    def beat_owed(self) -> bool:
        """Whether the peer should be told now what was counted."""
        return self.reaped - self.reported_reaped >= max(1, self.window // 4)

    def took(self, operation: Operation) -> None:
        """The network took an operation."""
        self.operations[operation] = None
        if operation.write is not None:
            self.posted_imms += 1
            self.writes_in_flight += 1
            self.bytes_in_flight += operation.write.num_bytes

    def gave_back(self, operation: Operation) -> None:
        """The network gave an operation back."""
        del self.operations[operation]
        if operation.write is not None:
            self.writes_in_flight -= 1
            self.bytes_in_flight -= operation.write.num_bytes
