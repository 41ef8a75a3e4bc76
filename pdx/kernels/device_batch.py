"""A pass's batch on the device of its rank: what kernels read, brought there in one copy.

The rank's main thread makes the arrays on the host, copies all of a pass at once, and gets the
batch whose tensors lie on the device. No op of a layer then has to ask the host for anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdx.kernels.page_tables import PageTables
from pdx.kernels.paged_batch import BatchPart, PagedBatch, PagedSpan

__all__ = ["DeviceBatch", "DevicePart", "PartTables", "PassTables", "host_arrays", "on_device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTables:
    """The steps (``PagedSpan.is_step``) and the others, by their rows in the whole pass."""

    steps: PageTables
    chunks: PageTables

    @classmethod
    def of(cls, batch: PagedBatch, device: torch.device) -> PassTables:
        """Those of a batch: its own, or copies of the host's."""
        if isinstance(batch, DeviceBatch):
            return batch.tables
        steps = [span for span in batch.spans if span.is_step]
        chunks = [span for span in batch.spans if not span.is_step]
        return cls(steps=PageTables.of(steps, device), chunks=PageTables.of(chunks, device))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTables:
    """All spans of a part of a pass, by their rows in it."""

    spans: PageTables
    #: int32 [B]: where each context begins where they lie one after the other.
    context_starts: Tensor

    @classmethod
    def of(cls, batch: PagedBatch, device: torch.device) -> PartTables:
        """Those of a part: its own, or copies of the host's."""
        if isinstance(batch, DevicePart):
            return batch.tables
        spans = PageTables.of(batch.spans, device)
        starts = spans.context_lens.cumsum(0, dtype=torch.int32) - spans.context_lens
        return cls(spans=spans, context_starts=starts)


@dataclass(frozen=True, kw_only=True)
class DevicePart(PagedBatch):
    """A part of a pass. ``decode_steps`` is the host's: only ops of the CPU read it."""

    tables: PartTables


@dataclass(frozen=True, kw_only=True)
class DeviceBatch(PagedBatch):
    """A whole pass; its parts were brought to the device with it."""

    tables: PassTables
    parts: tuple[BatchPart, BatchPart]

    @property
    def decode_part(self) -> BatchPart:
        return self.parts[0]

    @property
    def chunk_part(self) -> BatchPart:
        return self.parts[1]


def host_arrays(batch: PagedBatch) -> dict[str, Tensor]:
    """What :func:`on_device` needs of a batch on the device, by name; on the host."""
    pages = [span.page_indices for span in batch.spans]
    table_starts = _starts([len(indices) for indices in pages])
    arrays = {
        "token_pages": batch.token_pages,
        "token_offsets": batch.token_offsets,
        # One entry at least: a kernel may be given no pointer to nothing.
        "page_indices": torch.cat([*pages, torch.zeros(1, dtype=torch.int64)]).to(torch.int32),
    }
    by_start = {
        span.start: start for span, start in zip(batch.spans, table_starts.tolist(), strict=True)
    }
    for name, part in (("steps", batch.decode_part), ("chunks", batch.chunk_part)):
        whole = [s for s in batch.spans if s.is_step == (name == "steps")]
        context_lens = [span.context_len for span in whole]
        arrays |= {
            f"{name}.rows": part.rows,
            f"{name}.row_starts": _int32([span.start for span in whole]),
            f"{name}.part_starts": _int32([span.start for span in part.batch.spans]),
            f"{name}.num_rows": _int32([span.num_tokens for span in whole]),
            f"{name}.context_lens": _int32(context_lens),
            f"{name}.context_starts": _starts(context_lens),
            f"{name}.table_starts": _int32([by_start[span.start] for span in whole]),
        }
    return arrays


def on_device(batch: PagedBatch, arrays: Mapping[str, Tensor]) -> DeviceBatch:
    """The batch with its tensors on a device.

    Args:
        batch: on the host.
        arrays: of ``host_arrays(batch)``, copied to the device.
    """
    spans, begin = [], 0
    for span in batch.spans:
        end = begin + len(span.page_indices)
        spans.append(replace(span, page_indices=arrays["page_indices"][begin:end]))
        begin = end
    steps = [span for span in spans if span.is_step]
    chunks = [span for span in spans if not span.is_step]
    return DeviceBatch(
        spans=tuple(spans),
        decode_steps=batch.decode_steps,
        chunks=tuple(span for span in spans if span.num_tokens > 1),
        token_pages=arrays["token_pages"],
        token_offsets=arrays["token_offsets"],
        tables=PassTables(
            steps=_tables(arrays, "steps", "row_starts", steps),
            chunks=_tables(arrays, "chunks", "row_starts", chunks),
        ),
        parts=(
            _part(arrays, "steps", batch.decode_part.batch, steps),
            _part(arrays, "chunks", batch.chunk_part.batch, chunks),
        ),
    )


def _part(
    arrays: Mapping[str, Tensor], name: str, host: PagedBatch, spans: Sequence[PagedSpan]
) -> BatchPart:
    moved = tuple(
        replace(ours, page_indices=span.page_indices)
        for ours, span in zip(host.spans, spans, strict=True)
    )
    batch = DevicePart(
        spans=moved,
        decode_steps=host.decode_steps,
        chunks=tuple(span for span in moved if span.num_tokens > 1),
        # Tokens are appended before a pass is parted.
        token_pages=host.token_pages,
        token_offsets=host.token_offsets,
        tables=PartTables(
            spans=_tables(arrays, name, "part_starts", spans),
            context_starts=arrays[f"{name}.context_starts"],
        ),
    )
    return BatchPart(rows=arrays[f"{name}.rows"], batch=batch)


def _tables(
    arrays: Mapping[str, Tensor], name: str, row_starts: str, spans: Sequence[PagedSpan]
) -> PageTables:
    return PageTables(
        row_starts=arrays[f"{name}.{row_starts}"],
        num_rows=arrays[f"{name}.num_rows"],
        context_lens=arrays[f"{name}.context_lens"],
        table_starts=arrays[f"{name}.table_starts"],
        page_indices=arrays["page_indices"],
        max_rows=max((span.num_tokens for span in spans), default=0),
        max_context_len=max((span.context_len for span in spans), default=0),
    )


def _starts(lengths: Sequence[int]) -> Tensor:
    """Where each begins where they lie one after the other."""
    ends = _int32(lengths).cumsum(0, dtype=torch.int32)
    return ends - _int32(lengths)


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
