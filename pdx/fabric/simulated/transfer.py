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
        return cls(dip_from_bytes=4 << 10, dip_to_bytes=64 << 10) if provider == "shm" else cls()

    def gather_limit(self, atom_bytes: int) -> int:
        """Bytes up to which pieces of one atom each are gathered."""
        most = min(atom_bytes * self.max_pieces, self.max_gathered_bytes)
        return self.dip_from_bytes if self.dip_from_bytes < most < self.dip_to_bytes else most


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous part of a write; offsets are from the starts of the two regions."""

    src_offset: int
    dst_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Write:
    """One write: pieces that land in no order, and one immediate for all their atoms."""

    pieces: tuple[Piece, ...]
    atoms: int

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


class Batch:
    """A PageBatch and how far it is: which layers may go, and the next atom to post."""

    def __init__(self, batch: PageBatch, *, word: int | None = None, first_value: int = 0) -> None:
        #: Address of the progress word; None: all layers may go.
        self.word = word
        self.due_layers = batch.num_layers if word is None else 0
        self.num_layers = batch.num_layers
        self._first_value = first_value
        self._batch = batch
        self._layer = self._page = 0
        src, dst = batch.page_strides
        # Copied: the caller's arrays are its own again when write() returns.
        self._sources = [page * src for page in batch.src_pages.tolist()]
        self._targets = [page * dst for page in batch.dst_pages.tolist()]
        if not self._sources:
            self._layer = self.due_layers

    @property
    def ready(self) -> bool:
        return self._layer < self.due_layers

    @property
    def finished(self) -> bool:
        return self._layer == self.num_layers

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
            self._layer = due
        return True

    def next_write(self, shape: WriteShape) -> tuple[Write, tuple[int, int]]:
        """The next write of what is due, and the position after it, for advance()."""
        layer, page = self._layer, self._page
        pieces: list[Piece] = []
        num_bytes = atoms = 0
        gather_limit = shape.gather_limit(self._batch.page_bytes)
        while layer < self.due_layers and atoms < shape.max_atoms:
            atom = self._atom(layer, page)
            last = pieces[-1] if pieces else None
            total = num_bytes + atom.num_bytes
            if last and _neighbours(last, atom) and total <= shape.max_merged_bytes:
                merged = last.num_bytes + atom.num_bytes
                pieces[-1] = Piece(last.src_offset, last.dst_offset, merged)
            elif not last or (len(pieces) < shape.max_pieces and total <= gather_limit):
                pieces.append(atom)
            else:
                break
            num_bytes, atoms = total, atoms + 1
            page += 1
            if page == len(self._sources):
                layer, page = layer + 1, 0
        assert pieces
        return Write(tuple(pieces), atoms), (layer, page)

    def ranges(self) -> tuple[list[Range], list[Range]]:
        """Where the first layer of each page is read, and where it is written."""
        batch = self._batch
        return (
            [(batch.src_offset + offset, batch.page_bytes) for offset in self._sources],
            [(batch.dst_offset + offset, batch.page_bytes) for offset in self._targets],
        )

    def advance(self, position: tuple[int, int]) -> None:
        """What next_write() returned is posted."""
        self._layer, self._page = position

    def _atom(self, layer: int, page: int) -> Piece:
        batch = self._batch
        return Piece(
            batch.src_offset + layer * batch.src_layer_stride + self._sources[page],
            batch.dst_offset + layer * batch.dst_layer_stride + self._targets[page],
            batch.page_bytes,
        )


def _neighbours(last: Piece, atom: Piece) -> bool:
    return (
        atom.src_offset == last.src_offset + last.num_bytes
        and atom.dst_offset == last.dst_offset + last.num_bytes
    )


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
        return next((batch for batch in self.batches if batch.ready), None)

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
