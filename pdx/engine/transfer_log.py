"""What a decoder remembers of its transfers, for people who look: nothing depends on it.

Owned by the decode node's event loop.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pdx.kv.pages import Proof
from pdx.messenger.decode_link import DecodeLink
from pdx.messenger.messages import Prefill
from pdx.metrics.clock import now_s
from pdx.metrics.transfers import Transfers, TransferState, TransferView

__all__ = ["TransferLog"]

_MAX_RECENT = 100


@dataclass(slots=True)
class _Entry:
    link: DecodeLink
    #: The message without its tokens, which nobody needs again.
    transfer_id: int
    num_tokens: int
    num_bytes: int
    atoms: int
    #: CLOCK_MONOTONIC seconds, as all here.
    start_s: float = field(default_factory=now_s)
    end_s: float | None = None
    state: TransferState = "landing"
    is_settled: bool = False
    atoms_landed: int = 0
    reason: str | None = None

    def end(self, state: TransferState, reason: str | None = None) -> None:
        """Only the first end counts."""
        if self.end_s is None:
            self.state, self.reason, self.end_s = state, reason, now_s()

    def view(self, at_s: float) -> TransferView:
        landed = self.atoms_landed
        if not self.is_settled:
            landed = self.link.atoms_landed(self.transfer_id)
        return TransferView(
            transfer_id=self.transfer_id,
            state=self.state,
            is_settled=self.is_settled,
            prefiller=self.link.peer,
            provider=self.link.provider,
            num_tokens=self.num_tokens,
            num_bytes=self.num_bytes,
            atoms=self.atoms,
            atoms_landed=landed,
            age_s=at_s - self.start_s,
            duration_s=None if self.end_s is None else self.end_s - self.start_s,
            reason=self.reason,
        )


class TransferLog:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._live: dict[int, _Entry] = {}
        self._recent: deque[_Entry] = deque(maxlen=_MAX_RECENT)

    def views(self) -> Transfers:
        """All that is remembered."""
        at_s = now_s()
        return Transfers(
            live=[entry.view(at_s) for entry in self._live.values()],
            recent=[entry.view(at_s) for entry in self._recent],
        )

    def started(self, prefill: Prefill, link: DecodeLink, num_bytes: int) -> None:
        """A prefiller is about to be asked."""
        self._live[prefill.transfer_id] = _Entry(
            link=link,
            transfer_id=prefill.transfer_id,
            num_tokens=len(prefill.token_ids),
            num_bytes=num_bytes,
            atoms=prefill.atoms,
        )

    def cancelled(self, transfer_id: int) -> None:
        """Nobody wants it any more."""
        if (entry := self._live.get(transfer_id)) is not None:
            entry.end("cancelled")

    def lost(self, transfer_id: int, reason: str) -> None:
        """It will not come. That it was refused is known when this is told, settled just before."""
        entry = self._live.get(transfer_id)
        if entry is not None:
            entry.end("lost", reason)
            return
        for entry in reversed(self._recent):
            if entry.transfer_id == transfer_id and entry.state == "refused":
                entry.reason = reason

    def settled(self, transfer_id: int, proof: Proof) -> None:
        """No write of it can come any more."""
        entry = self._live.pop(transfer_id)
        match proof:
            case Proof.COUNTED:
                entry.end("landed")
                entry.atoms_landed = entry.atoms
            case Proof.NOT_STARTED:
                entry.end("refused")
            case _:
                entry.end("lost")
        entry.is_settled = True
        self._recent.append(entry)
