"""A decoder's transfers: one object for each, from the moment when a prefiller is asked.

A transfer is settled when no write of it can come any more, and decided when its request knows what
came of it: the KV cache is here, it will not come, or the client has left. It ends when both have
happened, in either order; the last ended ones are kept for people who look. Invariants, whatever
order a link's words come in:

1. The lease is under :attr:`Use.REMOTE_WRITE` until the transfer is settled: once, with a proof.
2. The prefiller counts the tokens as queued exactly as long, or until it has a new link.
3. The prefiller's breaker hears of one outcome.
4. What is said after the decision reaches no request; it may have another transfer by then.

Owned by the decode node's event loop.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from pdx.engine.decode_request import DecodeRequest
from pdx.engine.prefillers import Prefiller
from pdx.errors import RequestError
from pdx.kv.pages import PagePool, Proof, Use
from pdx.messenger.actions import PrefillTimes
from pdx.messenger.decode_link import Arrival, DecodeLink
from pdx.metrics.clock import now_s
from pdx.metrics.transfers import Transfers, TransferState, TransferView

__all__ = ["Transfer", "TransferTable"]

_MAX_RECENT = 100


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    """One prompt's KV cache on its way here. Times are CLOCK_MONOTONIC seconds."""

    transfer_id: int
    #: The request that waits for it; None once it is decided.
    request: DecodeRequest | None
    lease_id: int
    prefiller: Prefiller
    link: DecodeLink
    #: Tokens of the prompt that are in the cache when it is here.
    num_tokens: int
    #: Those of them that this node lacks, and asks for.
    num_asked: int
    num_bytes: int
    #: What this node's ranks will count, all together.
    atoms: int = 0
    start_s: float = field(default_factory=now_s)
    end_s: float | None = None
    state: TransferState = "landing"
    #: Why it was refused or lost.
    reason: str | None = None
    #: Why no write of it can come any more; None: one can.
    proof: Proof | None = None
    arrival: Arrival | None = None
    times: PrefillTimes | None = None

    @property
    def is_decided(self) -> bool:
        """Its request knows what came of it."""
        return self.request is None

    def settle(self, proof: Proof, pool: PagePool) -> None:
        """No write can come any more: the pages are not held on its account."""
        assert self.proof is None, f"transfer {self.transfer_id} is settled twice"
        self.proof = proof
        self.prefiller.on_settled(self.link, self.num_asked)
        match proof:
            case Proof.COUNTED:
                self._end_as("landed")
            case Proof.NOT_STARTED:
                self._end_as("refused")
            case _:
                self._end_as("lost")
        pool.drop(self.lease_id, Use.REMOTE_WRITE, proof)

    def ready(self) -> DecodeRequest:
        """All that the request waited for is here. Returns the request, which may start."""
        self.prefiller.breaker.on_success()
        return self._decide()

    def lose(self, error: RequestError, *, is_its_own_fault: bool) -> DecodeRequest:
        """The KV cache will not come. Returns the request, which needs another.

        Args:
            is_its_own_fault: the request would fail at every prefiller, which says nothing of this
                one.
        """
        if is_its_own_fault:
            self.prefiller.breaker.on_abort()
        else:
            self.prefiller.on_failure()
        self._end_as("lost", error.message)
        if (
            self.state == "refused"
        ):  # as is known when it is settled, just before the reason is told
            self.reason = error.message
        request = self._decide()
        request.on_lost(self, error)
        return request

    def cancel(self) -> None:
        """The client has left."""
        self.prefiller.breaker.on_abort()
        self._end_as("cancelled")
        self._decide()

    def view(self, at_s: float) -> TransferView:
        """What people see of it."""
        landed = self.atoms if self.proof is Proof.COUNTED else 0
        if self.proof is None:
            landed = self.link.atoms_landed(self.transfer_id)
        return TransferView(
            transfer_id=self.transfer_id,
            state=self.state,
            is_settled=self.proof is not None,
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

    def _decide(self) -> DecodeRequest:
        request, self.request = self.request, None
        assert request is not None, f"transfer {self.transfer_id} is decided twice"
        return request

    def _end_as(self, state: TransferState, reason: str | None = None) -> None:
        """Only the first end counts."""
        if self.end_s is None:
            self.state, self.reason, self.end_s = state, reason, now_s()


class TransferTable:
    """A node's transfers by id: all that have not ended, and the last ones that have."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._by_id: dict[int, Transfer] = {}
        #: The last ones that have ended, oldest first. A prefiller's last word may still come.
        self._ended: dict[int, Transfer] = {}
        self._next_id = itertools.count(1)

    @property
    def num_unsettled(self) -> int:
        """Transfers whose pages a prefiller may still write."""
        return sum(transfer.proof is None for transfer in self._by_id.values())

    def start(
        self,
        request: DecodeRequest,
        prefiller: Prefiller,
        link: DecodeLink,
        *,
        lease_id: int,
        num_tokens: int,
        num_asked: int,
        num_bytes: int,
    ) -> Transfer:
        """A prefiller is about to be asked; its writes may come from now on."""
        transfer = Transfer(
            transfer_id=next(self._next_id),
            request=request,
            lease_id=lease_id,
            prefiller=prefiller,
            link=link,
            num_tokens=num_tokens,
            num_asked=num_asked,
            num_bytes=num_bytes,
        )
        self._by_id[transfer.transfer_id] = transfer
        self._pool.hold(lease_id, Use.REMOTE_WRITE)
        prefiller.on_asked(transfer.transfer_id, num_asked)
        request.on_asked(transfer)
        return transfer

    def get(self, transfer_id: int) -> Transfer | None:
        """A transfer that has not ended, or not long ago."""
        return self._by_id.get(transfer_id) or self._ended.get(transfer_id)

    def listener(self, transfer_id: int) -> DecodeRequest:
        """The request that waits for a transfer.

        Raises:
            KeyError: no such transfer is under way.
        """
        request = self._by_id[transfer_id].request
        assert request is not None, f"transfer {transfer_id} is decided"
        return request

    def settle(self, transfer_id: int, proof: Proof) -> None:
        """No write of it can come any more."""
        transfer = self._by_id[transfer_id]
        transfer.settle(proof, self._pool)
        self._end_if_over(transfer)

    def arrive(self, transfer_id: int, arrival: Arrival) -> None:
        """The KV cache is here, complete. The prompt's log-probabilities may still be to come."""
        self._by_id[transfer_id].arrival = arrival
        self.listener(transfer_id).on_arrived(self._by_id[transfer_id])

    def ready(self, transfer_id: int) -> DecodeRequest:
        """See :meth:`Transfer.ready`."""
        transfer = self._by_id[transfer_id]
        request = transfer.ready()
        self._end_if_over(transfer)
        return request

    def lose(
        self, transfer_id: int, error: RequestError, *, is_its_own_fault: bool
    ) -> DecodeRequest:
        """See :meth:`Transfer.lose`."""
        transfer = self._by_id[transfer_id]
        request = transfer.lose(error, is_its_own_fault=is_its_own_fault)
        self._end_if_over(transfer)
        return request

    def cancel(self, transfer: Transfer) -> None:
        """See :meth:`Transfer.cancel`."""
        transfer.cancel()
        self._end_if_over(transfer)

    def views(self) -> Transfers:
        """All that are known."""
        at_s = now_s()
        return Transfers(
            live=[transfer.view(at_s) for transfer in self._by_id.values()],
            recent=[transfer.view(at_s) for transfer in self._ended.values()],
        )

    def _end_if_over(self, transfer: Transfer) -> None:
        if transfer.proof is None or not transfer.is_decided:
            return
        del self._by_id[transfer.transfer_id]
        self._ended[transfer.transfer_id] = transfer
        if len(self._ended) > _MAX_RECENT:
            del self._ended[next(iter(self._ended))]
