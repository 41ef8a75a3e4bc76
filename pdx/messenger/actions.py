"""What the state machines of both sides want done: frozen data; the drivers of links do it."""

from __future__ import annotations

from dataclasses import dataclass

from pdx.errors import RequestError
from pdx.kv.pages import Proof
from pdx.messenger.messages import ChunkTimes, ControlMessage, Prefill
from pdx.messenger.plan import RankBatch
from pdx.metrics.faults import Fault
from pdx.request.batch import ScoredToken

__all__ = [
    "Accept",
    "Arm",
    "Cached",
    "CancelSend",
    "Counted",
    "DecodeAction",
    "Dropped",
    "EndLink",
    "Expect",
    "Faulted",
    "HoldSource",
    "Lost",
    "OpenSend",
    "PrefillAction",
    "PrefillTimes",
    "Ready",
    "Release",
    "ReleaseSource",
    "Retarget",
    "Scores",
    "Seal",
    "Send",
    "Settled",
]


@dataclass(frozen=True, slots=True)
class Send:
    """Put a message on the control link."""

    message: ControlMessage


@dataclass(frozen=True, slots=True)
class EndLink:
    """The link cannot be trusted any more: end and fence it."""

    reason: str
    fault: Fault


@dataclass(frozen=True, slots=True)
class Expect:
    """Arm the slot on every fabric worker; must be done before the next action."""

    slot: int
    generation: int
    atoms: int


@dataclass(frozen=True, slots=True)
class Retarget:
    """The peer stopped early: wait for this many atoms instead."""

    slot: int
    generation: int
    atoms: int


@dataclass(frozen=True, slots=True)
class Release:
    """Disarm the slot."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Settled:
    """No write of this transfer can touch our memory any more, for the reason given."""

    transfer_id: int
    proof: Proof


@dataclass(frozen=True, slots=True)
class Counted:
    """The KV cache is here, complete."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class Ready:
    """All that the request waited for is here: the KV cache, and scores if it asked for them."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The KV cache will not come; the request fails or is tried again elsewhere."""

    transfer_id: int
    error: RequestError
    #: What is to be counted for this transfer; None: nothing, or its link's fault.
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of the prompt's next tokens."""

    transfer_id: int
    tokens: list[ScoredToken]


@dataclass(frozen=True, slots=True)
class Cached:
    """The prefiller had these first tokens of the prompt in its prefix cache."""

    transfer_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """When the prefiller worked, on its host's monotonic clock."""

    transfer_id: int
    prefill_start_ns: int
    last_layer_ns: int
    posted_ns: int = 0
    chunks: tuple[ChunkTimes, ...] = ()

    @property
    def transfer_outlasts_prefill(self) -> bool:
        """Writing took longer after the last layer than all of the computing before."""
        return self.posted_ns - self.last_layer_ns > self.last_layer_ns - self.prefill_start_ns


DecodeAction = (
    Send
    | Expect
    | Retarget
    | Release
    | EndLink
    | Settled
    | Cached
    | Counted
    | Scores
    | Ready
    | Lost
    | PrefillTimes
)


@dataclass(frozen=True, slots=True)
class Accept:
    """Queue the prompt; answer with :meth:`PrefillSide.refuse` if that is impossible."""

    prefill: Prefill


@dataclass(frozen=True, slots=True)
class Dropped:
    """Nobody wants the prompt any more: leave the queue, or stop after the running chunk."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class Faulted:
    """A transfer failed while its link goes on."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class HoldSource:
    """Writes that read the request's pages are about to be armed."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class ReleaseSource:
    """No write of ours reads the pages any more; ``unproved``: but for failed ones."""

    transfer_id: int
    unproved: bool


@dataclass(frozen=True, slots=True)
class OpenSend:
    """Open a transfer on the fabric."""

    transfer_id: int
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Arm:
    """Post each layer of these pages when their rank's progress in this pass reaches it."""

    transfer_id: int
    batches: tuple[RankBatch, ...]
    pass_idx: int


@dataclass(frozen=True, slots=True)
class Seal:
    """Nothing more will be armed."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class CancelSend:
    """Drop what is not posted."""

    transfer_id: int


PrefillAction = (
    Send
    | Accept
    | Dropped
    | Faulted
    | HoldSource
    | ReleaseSource
    | OpenSend
    | Arm
    | Seal
    | CancelSend
)
