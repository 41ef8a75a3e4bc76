"""A node's transfers as it tells of them: a decoder's under way and its last ones, a prefiller's
under way.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

__all__ = [
    "NodeTransfers",
    "RankProgress",
    "SendView",
    "Sends",
    "TransferState",
    "TransferView",
    "Transfers",
]

#: What has become of a transfer: writes are landing; all have; its client has left; the prefiller
#: refused it; it, or its link, failed.
TransferState: TypeAlias = Literal["landing", "landed", "cancelled", "refused", "lost"]


class TransferView(msgspec.Struct, frozen=True, kw_only=True):
    """One request's KV cache on its way into this node."""

    transfer_id: int
    state: TransferState
    #: No write of it can come any more: its pages are not held on its account.
    is_settled: bool
    #: Control address of the prefiller.
    prefiller: str
    #: libfabric provider.
    provider: str
    #: Prompt tokens whose KV is moved.
    num_tokens: int
    num_bytes: int
    #: Contiguous pieces that the receiver counts: expected, and landed so far.
    atoms: int
    atoms_landed: int
    #: Since the prefiller was asked.
    age_s: float
    #: From asking the prefiller to the end: all landed, or no more wanted. None: under way.
    duration_s: float | None = None
    #: Why it was refused or lost.
    reason: str | None = None


class Transfers(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="decoder"):
    """A decoder's, oldest first."""

    #: Not settled yet.
    live: list[TransferView]
    #: The last ones that are.
    recent: list[TransferView]


class SendView(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt's KV cache on its way out of a prefiller."""

    transfer_id: int
    #: Waits for its first chunk; is computed and written; is written only; is dropped.
    state: Literal["queued", "open", "sealed", "cancelled"]
    #: Address of the decoder's end of the control link.
    decoder: str
    provider: str
    num_tokens: int
    #: How many of these the passes so far have computed, the running one included.
    num_armed: int
    atoms: int


class RankProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank is in its latest pass."""

    pass_idx: int
    #: Layers whose KV is in memory; 0 between two passes.
    layers_done: int
    num_layers: int


class Sends(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="prefiller"):
    """A prefiller's, oldest first by link."""

    ranks: list[RankProgress]
    live: list[SendView]


NodeTransfers = Transfers | Sends
