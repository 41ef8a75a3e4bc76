"""Bugs of the known kinds, to be planted in the real code for as long as a history runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from pdx.errors import FabricError
from pdx.kv.pages import PagePool, Proof, Use
from pdx.lab.simulated_fabric.imm import Imm
from pdx.lab.simulated_fabric.link import LinkState, Operation, OpKind
from pdx.lab.simulated_fabric.network import SimulatedNetwork
from pdx.lab.simulated_fabric.nodes import Endpoint
from pdx.lab.simulated_fabric.slots import SlotTable as FabricSlots
from pdx.lab.simulated_fabric.worker import Worker
from pdx.messenger import decode_side
from pdx.messenger.actions import DecodeAction, Expect
from pdx.messenger.decode_link import DecodeLink
from pdx.messenger.decode_side import DecodeSide
from pdx.messenger.plan import TransferPlan
from pdx.messenger.slots import SlotTable

__all__ = ["MUTATIONS"]


def free_on_a_timer(patch: pytest.MonkeyPatch) -> None:
    """A cancelled transfer's pages are free at the next tick."""
    original = DecodeSide.on_tick

    def on_tick(self: DecodeSide, now: float, counts: Any) -> list[DecodeAction]:
        actions: list[DecodeAction] = []
        for transfer in list(self._transfers.values()):
            if transfer.state is decode_side._State.CANCELLED:
                del self._transfers[transfer.transfer_id]
                actions += self._settle(transfer, Proof.DRAINED)
        return actions + original(self, now, counts)

    patch.setattr(DecodeSide, "on_tick", on_tick)


def free_on_drained(patch: pytest.MonkeyPatch) -> None:
    """A cancelled transfer's pages are free when the peer has drained, whatever has come."""

    def on_total(
        self: DecodeSide, transfer_id: int, atoms: int, failed: int, now: float
    ) -> list[DecodeAction]:
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.state is not decode_side._State.CANCELLED:
            return []
        del self._transfers[transfer_id]
        return self._settle(transfer, Proof.DRAINED)

    patch.setattr(DecodeSide, "_on_total", on_total)


def fence_by_key_only(patch: pytest.MonkeyPatch) -> None:
    """A fence stops new writes; those on their way still land."""
    original = Worker.fence

    def close_the_key(network: SimulatedNetwork, endpoint: Endpoint) -> None:
        endpoint.closed = True
        del network._endpoints[endpoint.name]
        endpoint.node.endpoints.remove(endpoint)
        for callback in network._gone.pop(endpoint.name, []):
            callback()

    def fence(self: Worker, link_id: int) -> None:
        network = self._network
        network.close = lambda endpoint: close_the_key(network, endpoint)  # type: ignore[method-assign]
        original(self, link_id)
        del network.close

    patch.setattr(Worker, "fence", fence)


def forget_a_slot(patch: pytest.MonkeyPatch) -> None:
    """The slots of a link that is fenced are not given back."""
    original = DecodeSide.on_fenced

    def on_fenced(self: DecodeSide) -> list[DecodeAction]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SlotTable, "give_back", lambda self, slot: None)
            return original(self)

    patch.setattr(DecodeSide, "on_fenced", on_fenced)


def pair_from_the_wrong_end(patch: pytest.MonkeyPatch) -> None:
    """The decoder's pages are paired with the prompt's first ones, though it has those."""
    original = TransferPlan.batches

    def batches(self: TransferPlan, layers: Any, pages: tuple[int, ...], *runs: int) -> Any:
        skipped = self.first_position // self._src.rank.page_size
        return original(self, layers, (*pages[:skipped], *pages)[: len(pages)], *runs)

    patch.setattr(TransferPlan, "batches", batches)


def reuse_without_a_generation(patch: pytest.MonkeyPatch) -> None:
    """A slot's next transfer has the same generation."""

    def give_back(self: SlotTable, slot: int) -> None:
        self._taken.remove(slot)
        self._free.append(slot)

    patch.setattr(SlotTable, "give_back", give_back)


def credit_a_stale_imm(patch: pytest.MonkeyPatch) -> None:
    """An immediate counts for whoever has the slot now."""
    original = FabricSlots.credit

    def credit(self: FabricSlots, imm: Imm, now_ns: int) -> bool:
        slot = self._slots.get(imm.slot)
        generation = imm.generation if slot is None else slot.generation
        return original(self, Imm(imm.slot, generation, imm.atoms), now_ns)

    patch.setattr(FabricSlots, "credit", credit)


def repost_an_unknown_write(patch: pytest.MonkeyPatch) -> None:
    """A write that was reported failed is posted once more."""
    original = Worker.on_complete
    again: set[Operation] = set()

    def on_complete(self: Worker, operation: Operation, code: int) -> None:
        link = operation.link
        is_up = link is not None and link.state is LinkState.UP
        if code and is_up and operation.kind is OpKind.WRITE and operation not in again:
            again.add(operation)
            endpoint = self._endpoints[link.id][operation.lane.own]
            self._network.post(endpoint, operation)
        else:
            original(self, operation, code)

    patch.setattr(Worker, "on_complete", on_complete)


def unpin_a_source_early(patch: pytest.MonkeyPatch) -> None:
    """Source pages are held by passes alone, not by the writes that read them."""
    hold, drop, exchange = PagePool.hold, PagePool.drop, PagePool.exchange

    def mutated_hold(self: PagePool, lease_id: int, use: Use) -> None:
        if use is not Use.SEND:
            hold(self, lease_id, use)

    def mutated_drop(self: PagePool, lease_id: int, use: Use, proof: Proof | None = None) -> None:
        if use not in (Use.SEND, Use.UNPROVED_SEND):
            drop(self, lease_id, use, proof)

    def mutated_exchange(self: PagePool, lease_id: int, old: Use, new: Use) -> None:
        if old is not Use.SEND:
            exchange(self, lease_id, old, new)

    patch.setattr(PagePool, "hold", mutated_hold)
    patch.setattr(PagePool, "drop", mutated_drop)
    patch.setattr(PagePool, "exchange", mutated_exchange)


def arm_after_dispatch(patch: pytest.MonkeyPatch) -> None:
    """The prefiller is asked before the count is armed."""
    original = DecodeLink._apply_fabric

    def apply_fabric(self: DecodeLink, action: Any) -> None:
        if not isinstance(action, Expect):
            with contextlib.suppress(FabricError):  # what follows may come before it is armed
                original(self, action)
            return

        def arm() -> None:
            with contextlib.suppress(FabricError):
                original(self, action)

        asyncio.get_running_loop().call_later(0.002, arm)

    patch.setattr(DecodeLink, "_apply_fabric", apply_fabric)


#: Each with the faults that bring it to light.
MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    mutation.__name__: mutation
    for mutation in (
        free_on_a_timer,
        free_on_drained,
        fence_by_key_only,
        forget_a_slot,
        pair_from_the_wrong_end,
        reuse_without_a_generation,
        credit_a_stale_imm,
        repost_an_unknown_write,
        unpin_a_source_early,
        arm_after_dispatch,
    )
}
