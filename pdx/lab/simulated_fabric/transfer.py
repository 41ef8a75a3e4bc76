"""One transfer on the writing side: its batches, how they are cut into writes, and its states.
Pure.

    open ──seal──> sealed ──all posted──┐
      │               │                 ├── nothing in flight ──> drained (TransferDone, once)
      └─cancel, fail──┴──> closing ─────┘

An open transfer takes batches and posts what is due. A sealed one takes no more. A closing one has
dropped what was not posted and only waits for what is in flight. A drained one has told its end.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from pdx.fabric.interface import PageBatch, Provider, TransferDone

__all__ = ["Batch", "Piece", "Range", "Transfer", "TransferState", "Write", "WriteShape"]

#: Offset from a region's start, and length; bytes.
Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteShape:
    """Limits of one write. Atoms are merged and gathered up to them, and never split."""

    max_atoms: int = 256
    max_pieces: int = 4
    max_merged_bytes: int = 4 << 20
    max_gathered_bytes: int = 1 << 20
    #: Writes between these sizes (both excluded) are slower than those of either size: atoms that
    #: could only make such a write stay below it.
    dip_from_bytes: int = 0
    dip_to_bytes: int = 0

    @classmethod
    def of(cls, provider: Provider) -> WriteShape:
        """What the native worker takes; measured, see native/providers."""
        return (
            cls(dip_from_bytes=4 << 10, dip_to_bytes=64 << 10)
            if provider == Provider.SHM
            else cls()
        )

    def gather_limit(self, atom_bytes: int) -> int:
        """Bytes up to which pieces of one atom each are gathered."""
        most = min(atom_bytes * self.max_pieces, self.max_gathered_bytes)
        return self.dip_from_bytes if self.dip_from_bytes < most < self.dip_to_bytes else most


class Piece(NamedTuple):
    """A contiguous part of a write; offsets are from the starts of the two regions."""

    src_offset: int
    dst_offset: int
    num_bytes: int


class Write(NamedTuple):
    """One write: pieces that land in no order, and one immediate for all their atoms."""

    pieces: tuple[Piece, ...]
    atoms: int
    #: The size of all pieces.
    num_bytes: int


class Batch:
    """A PageBatch and how far it is: which layers may go, and the next atom to post."""

    def __init__(self, batch: PageBatch, *, word: int | None = None, first_value: int = 0) -> None:
        #: Address of the progress word; None: all layers may go.
        self.word = word
        self.due_layers = batch.num_layers if word is None else 0
        self.num_layers = batch.num_layers
        self._first_value = first_value
        self._batch = batch
        #: The next to post from: it is due, or none is.
        self.layer = self._page = 0
        self._ranges: tuple[list[Range], list[Range]] | None = None
        src, dst = batch.page_strides
        # Copied: the caller's arrays are its own again when write() returns.
        self._sources = [page * src for page in batch.src_pages.tolist()]
        self._targets = [page * dst for page in batch.dst_pages.tolist()]
        if not self._sources:
            self.layer = self.due_layers

    @property
    def finished(self) -> bool:
        return self.layer == self.num_layers

    @property
    def armed(self) -> bool:
        return self.due_layers < self.num_layers

    def look(self, value: int) -> bool:
        """The word has this value. True if more layers became due."""
        due = max(0, min(value - self._first_value + 1, self.num_layers))
        if due <= self.due_layers:
            return False
        self.due_layers = due
        if not self._sources:
            self.layer = due
        return True

    def next_write(self, shape: WriteShape) -> tuple[Write, tuple[int, int]]:
        """The next write of what is due, and the position after it, for advance()."""
        batch, sources, targets = self._batch, self._sources, self._targets
        layer, page = self.layer, self._page
        #: The piece that grows, after those that are complete.
        pieces: list[Piece] = []
        src = dst = length = 0
        num_bytes = atoms = 0
        page_bytes = batch.page_bytes
        gather_limit = shape.gather_limit(page_bytes)
        while layer < self.due_layers and atoms < shape.max_atoms:
            atom_src = batch.src_offset + layer * batch.src_layer_stride + sources[page]
            atom_dst = batch.dst_offset + layer * batch.dst_layer_stride + targets[page]
            total = num_bytes + page_bytes
            are_neighbours = atom_src == src + length and atom_dst == dst + length
            if atoms and are_neighbours and total <= shape.max_merged_bytes:
                length += page_bytes
            elif not atoms:
                src, dst, length = atom_src, atom_dst, page_bytes
            elif len(pieces) + 1 < shape.max_pieces and total <= gather_limit:
                pieces.append(Piece(src, dst, length))
                src, dst, length = atom_src, atom_dst, page_bytes
            else:
                break
            num_bytes, atoms = total, atoms + 1
            page += 1
            if page == len(sources):
                layer, page = layer + 1, 0
        assert atoms
        pieces.append(Piece(src, dst, length))
        return Write(tuple(pieces), atoms, num_bytes), (layer, page)

    def ranges(self) -> tuple[list[Range], list[Range]]:
        """Where the first layer of each page is read, and where it is written."""
        if self._ranges is None:
            batch = self._batch
            self._ranges = (
                [(batch.src_offset + offset, batch.page_bytes) for offset in self._sources],
                [(batch.dst_offset + offset, batch.page_bytes) for offset in self._targets],
            )
        return self._ranges

    def advance(self, position: tuple[int, int]) -> None:
        """What next_write() returned is posted."""
        self.layer, self._page = position


class TransferState(enum.Enum):
    """See the module's drawing."""

    OPEN = enum.auto()
    SEALED = enum.auto()
    CLOSING = enum.auto()
    DRAINED = enum.auto()


@dataclass(slots=True, eq=False)
class Transfer:
    """See the module. Every method that may end it is followed by a look at drained()."""

    id: int
    link: int
    slot: int
    generation: int
    state: TransferState = TransferState.OPEN
    #: Those that are not wholly posted.
    batches: list[Batch] = field(default_factory=list)
    posted_atoms: int = 0
    failed_atoms: int = 0
    writes_in_flight: int = 0
    cancelled: bool = False
    code: int = 0
    first_post_ns: int | None = None
    last_progress_ns: int | None = None

    @property
    def armed(self) -> bool:
        return any(batch.armed for batch in self.batches)

    @property
    def words(self) -> set[int]:
        """Addresses of the progress words it still waits for."""
        return {batch.word for batch in self.batches if batch.armed and batch.word is not None}

    def add(self, batch: Batch) -> None:
        """One more batch; ignored once closing, where its refusal crossed with it."""
        if self.state in (TransferState.OPEN, TransferState.SEALED) and not batch.finished:
            self.batches.append(batch)

    def look(self, word: int, value: int, now_ns: int) -> bool:
        """A progress word has this value. True if more layers may go."""
        due = False
        for batch in self.batches:
            if batch.word == word and batch.armed:
                due |= batch.look(value)
                if not batch.armed:
                    self.last_progress_ns = now_ns
        self._drop_finished()
        return due

    def first_ready(self) -> Batch | None:
        """The batch to post from next: a due one overtakes an older one that is not."""
        for batch in self.batches:
            if batch.layer < batch.due_layers:
                return batch
        return None

    def posted(self, write: Write, now_ns: int) -> None:
        """A write was handed to the network."""
        assert self.state in (TransferState.OPEN, TransferState.SEALED)
        if self.first_post_ns is None:
            self.first_post_ns = now_ns
        self.posted_atoms += write.atoms
        self.writes_in_flight += 1
        self._drop_finished()

    def completed(self, write: Write, code: int) -> None:
        """A write came back; with a code, nobody knows whether it arrived."""
        self.writes_in_flight -= 1
        if code:
            self.failed_atoms += write.atoms
            self.fail(code)

    def seal(self) -> None:
        """No more batches come."""
        if self.state is TransferState.OPEN:
            self.state = TransferState.SEALED

    def cancel(self) -> None:
        """Drop what is not posted."""
        self.cancelled = True
        self._close()

    def fail(self, code: int) -> None:
        """Something went wrong; the first code stays."""
        self.code = self.code or code
        self._close()

    def cut(self, writes: list[Write], code: int) -> None:
        """The fence: these writes were in flight and will never be heard of again."""
        self.writes_in_flight = 0
        if writes:
            self.failed_atoms += sum(write.atoms for write in writes)
            self.code = code
        elif not self.cancelled:
            self.code = self.code or code
        self._close()

    def drained(self) -> TransferDone | None:
        """The end, the first time that nothing is left of it."""
        finished = self.state is TransferState.CLOSING or (
            self.state is TransferState.SEALED and not self.batches
        )
        if not finished or self.writes_in_flight:
            return None
        self.state = TransferState.DRAINED
        return TransferDone(
            transfer=self.id,
            link=self.link,
            slot=self.slot,
            generation=self.generation,
            posted_atoms=self.posted_atoms,
            failed_atoms=self.failed_atoms,
            cancelled=self.cancelled,
            code=self.code,
            first_post_ns=self.first_post_ns,
            last_progress_ns=self.last_progress_ns,
        )

    def _close(self) -> None:
        self.batches.clear()
        if self.state is not TransferState.DRAINED:
            self.state = TransferState.CLOSING

    def _drop_finished(self) -> None:
        self.batches = [batch for batch in self.batches if not batch.finished]
