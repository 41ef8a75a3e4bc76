"""The invariants of a simulated cluster, and who watches them.

Whatever the network, the nodes and the clients do:

``page-sums``     On every node free + leased + in flight + filled + quarantined + cached pages are
                  all pages, after every change of a lease.
``live-target``   No page of a decoder is free, cached or leased again while a write into it can
                  still land: posted, or armed on a living peer, over a link whose endpoint is open.
``leased-target`` A write only ever lands in pages that are held for remote writes.
``live-source``   No page of a prefiller is free, cached or leased again while a posted or armed
                  write may still read it.
``right-tokens``  Every token (and score) that a client gets is what the model says: nobody has
                  attended to a stale, foreign or missing page.
``one-end``       A request ends exactly once.
``bounded``       It ends within a bound after its submission, or after the last fault is over.
``slots``         Slots taken are transfers open, at every look at a node's status; a slot's next
                  transfer has another generation.
``at-rest``       When all requests have ended, every page is free or cached, every slot free, no
                  transfer is open, on every living node.
``calm``          Until the first fault no link ends, and no immediate is stale.
``no-crash``      No node ends by itself or runs without ever waiting, no callback and no task fails
                  with what nobody expected.

A :class:`WatchedPool` checks the first ones at each change; the rest is checked by clients
(``pdx.lab.sim.clients``) and by the history (``pdx.lab.sim.history``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pdx.kv.layout import NodeLayout
from pdx.kv.pages import PagePool, Proof, Use
from pdx.lab.simulated_fabric import Landing, SimulatedNetwork
from pdx.messenger.slots import SlotTable

__all__ = ["INVARIANTS", "BrokenInvariant", "Watch", "WatchedPool", "WatchedSlots"]

INVARIANTS = (
    "page-sums",
    "live-target",
    "leased-target",
    "live-source",
    "right-tokens",
    "one-end",
    "bounded",
    "slots",
    "at-rest",
    "calm",
    "no-crash",
)


@dataclass(frozen=True, slots=True)
class BrokenInvariant(Exception):
    """What must not happen has happened; the history ends there."""

    invariant: str
    detail: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.detail}"


class Watch:
    """Looks at one node's memory from outside.

    Args:
        broken: told of the invariant and what broke it.
    """

    def __init__(
        self,
        node: str,
        network: SimulatedNetwork,
        layout: NodeLayout,
        broken: Callable[[str, str], None],
    ) -> None:
        self.node = node
        self.broken = broken
        self._network = network
        self._rank_stride = layout.rank_stride_bytes
        self._layer_stride = layout.rank.layer_stride_bytes
        self._page_bytes = layout.rank.page_bytes
        self.pool: WatchedPool | None = None

    def pages_of(self, spans: Iterable[tuple[int, int]]) -> set[int]:
        """The pages that ranges of our region (offset, bytes) lie in."""
        size = self._page_bytes
        pages: set[int] = set()
        for offset, num_bytes in spans:
            first = offset % self._rank_stride % self._layer_stride
            page, last = first // size, (first + num_bytes - 1) // size
            pages.add(page)
            while page < last:
                page += 1
                pages.add(page)
        return pages

    def check_untouched(self, pages: Iterable[int], what: str) -> None:
        """Nothing that is on its way, or armed, may touch these pages any more."""
        wanted = set(pages)
        if not wanted:
            return
        for spans in self._network.pending_targets(self.node):
            if touched := wanted & self.pages_of(spans):
                self.broken(
                    "live-target",
                    f"{self.node}: page {min(touched)} is {what}, and a write to it can still land",
                )
        for spans in self._network.pending_sources(self.node):
            if touched := wanted & self.pages_of(spans):
                self.broken(
                    "live-source",
                    f"{self.node}: page {min(touched)} is {what}, and a write may still read it",
                )

    def on_landing(self, landing: Landing) -> None:
        """Bytes have just landed here."""
        assert self.pool is not None
        spans = [(offset, num_bytes) for _, offset, num_bytes in landing.write.pieces]
        stray = self.pool.not_written_remotely(self.pages_of(spans))
        if stray:
            self.broken(
                "leased-target",
                f"{self.node}: a write of {landing.source_node} landed in page {min(stray)}, which "
                "nobody holds for it",
            )


class WatchedPool(PagePool):
    """The real pool, watched: each change of a lease is checked."""

    def __init__(self, num_pages: int, watch: Watch) -> None:
        super().__init__(num_pages)
        self._watch = watch
        watch.pool = self

    def not_written_remotely(self, pages: set[int]) -> set[int]:
        """Those of the pages that no peer's writes may land in."""
        left = pages.copy()
        for lease in self._leases.values():
            if lease.uses[Use.REMOTE_WRITE]:
                left.difference_update(lease.page_indices)
        return left

    def drop(self, lease_id: int, use: Use, proof: Proof | None = None) -> None:
        super().drop(lease_id, use, proof)
        self._check_sums()

    def retire(self, lease_id: int) -> None:
        super().retire(lease_id)
        self._check_sums()

    def _take(self, num_pages: int) -> list[int]:
        taken = super()._take(num_pages)
        self._watch.check_untouched(taken, "leased again")
        return taken

    def _free_pages(self, lease_id: int) -> None:
        pages = self._leases[lease_id].page_indices
        super()._free_pages(lease_id)
        left = [p for p, n in zip(pages, self._num_leases[pages].tolist(), strict=True) if not n]
        self._watch.check_untouched(left, "given back")

    def _check_sums(self) -> None:
        try:
            self.counts()
        except AssertionError as error:
            self._watch.broken("page-sums", f"{self._watch.node}: {error}")


class WatchedSlots(SlotTable):
    """The real table with fields of a few bits, watched.

    Args:
        bits: of a slot and of a generation.
        on_reused: told of a slot that is taken again, and its generation before.
    """

    def __init__(self, bits: int, watch: Watch, on_reused: Callable[[int, int], None]) -> None:
        size = 1 << bits
        super().__init__(num_slots=size, num_generations=size, num_free_kept=min(256, size // 16))
        self._watch = watch
        self._on_reused = on_reused
        self._before: dict[int, int] = {}

    def take(self) -> tuple[int, int] | None:
        pair = super().take()
        if pair is None:
            return None
        slot, generation = pair
        before = self._before.get(slot)
        self._before[slot] = generation
        if before is not None:
            if before == generation:
                self._watch.broken(
                    "slots", f"{self._watch.node}: pair {slot}.{generation} is taken twice in turn"
                )
            self._on_reused(slot, before)
        return pair
