"""A decoder's transfers as it tells of them: those under way, and the last ones."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

__all__ = ["TransferState", "TransferView", "Transfers"]

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


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    """Oldest first."""

    #: Not settled yet.
    live: list[TransferView]
    #: The last ones that are.
    recent: list[TransferView]
