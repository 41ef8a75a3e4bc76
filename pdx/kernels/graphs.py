"""A decode step as captured graphs: one for each of a few batch sizes, all over one batch's memory.

A replay has no Python, so its launches' arguments are what they were at the capture: what changes
from step to step is read from a batch whose addresses never change, which one copy fills. A step
with fewer requests than a graph has is padded: padding appends nothing (its page is negative) and
attends to nothing (it has no rows). What comes out of its rows is garbage that nobody reads, as no
op mixes rows.

A graph freezes addresses: of weights, of KV memory, of the progress word. So it is captured when
all of these exist, in the rank's warm-up, and over the real ones. The invariant: **until a pass
with requests replays it, a graph changes nothing that a reader may see.** A capture runs the step,
but on padding alone, which has no page to append to; and with a progress base of 0, which makes the
values that it stores those of pass 0. Passes count from 1, so nobody waits for these
(``pdx.kv.progress``). A rank's main thread; the first capture compiles, so capture before serving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pdx.kernels.batch import ForwardBatch
from pdx.kernels.staging import Staging

__all__ = [
    "AgreedCapture",
    "CaptureRefused",
    "Captured",
    "CudaGraphs",
    "DecodeGraphs",
    "GraphCapture",
    "GraphSettings",
    "batch_sizes",
]


#: For what lies between arrays in a copied buffer.
_SPARE_BYTES = 1024


class CaptureRefused(Exception):
    """A call that no graph can hold: it waits for the device, or brings it a value."""


class Captured(Protocol):
    """A graph. It owns the memory of its results."""

    @property
    def output(self) -> Tensor:
        """What the step gave; every replay fills it anew."""

    def replay(self) -> None:
        """Run it on the current stream."""


class GraphCapture(Protocol):
    """Makes graphs of calls."""

    def capture(self, run: Callable[[], Tensor]) -> Captured:
        """Run once to compile and to make what is made at first use, then once more, captured.

        Raises:
            CaptureRefused: no graph can hold it.
        """


@dataclass(frozen=True, slots=True)
class _CudaGraph:
    output: Tensor
    graph: torch.cuda.CUDAGraph

    def replay(self) -> None:
        self.graph.replay()


class CudaGraphs:
    """torch's graphs on the current device; all of them share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: graphs share memory only if they are captured on the same stream.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], Tensor]) -> Captured:
        """See :class:`GraphCapture`."""
        own = torch.cuda.current_stream()
        self._stream.wait_stream(own)
        with torch.cuda.stream(self._stream):
            run()
        own.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads are not ours to forbid anything: NCCL's asks for its events.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                output = run()
        except RuntimeError as error:
            torch.cuda.set_stream(own)  # a capture whose end fails leaves its own
            cause = error.__context__ or error
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from error
            raise CaptureRefused(str(cause)) from error
        return _CudaGraph(output, graph)


class AgreedCapture:
    """Captures on all ranks of a group or on none: the sums within a graph wait for every rank."""

    def __init__(self, capture: GraphCapture, all_agree: Callable[[bool], bool]) -> None:
        """
        Args:
            capture: this rank's own.
            all_agree: whether every rank of the group says yes; all of them call it together.
        """
        self._capture = capture
        self._all_agree = all_agree

    def capture(self, run: Callable[[], Tensor]) -> Captured:
        """See :class:`GraphCapture`."""
        captured, refusal = None, CaptureRefused("another rank could not capture them")
        try:
            captured = self._capture.capture(run)
        except CaptureRefused as error:
            refusal = error
        if not self._all_agree(captured is not None) or captured is None:
            raise refusal
        return captured


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSettings:
    """What a rank captures, and how."""

    capture: GraphCapture
    #: Batch sizes; a batch between two of them is padded.
    sizes: Sequence[int]
    #: Tokens of one request at most; attention is launched for it.
    max_seq_len: int


def batch_sizes(max_batch: int) -> list[int]:
    """Powers of two below the largest, and the largest."""
    return [*(1 << i for i in range((max_batch - 1).bit_length())), max_batch]


class DecodeGraphs:
    """Graphs of steps that give each of their requests one token, for several batch sizes."""

    def __init__(
        self,
        step: Callable[[ForwardBatch], Tensor],
        settings: GraphSettings,
        *,
        page_size: int,
        num_pages: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            step: a batch of ``size`` requests -> [size, ...], by kernels alone.
            settings: all of its sizes are captured here and now, the largest first, so that the
                others find room in its memory.
            page_size: tokens of a page.
            num_pages: of the KV memory.
            device: of the step.

        Raises:
            CaptureRefused: no graph can hold the step.
        """
        assert min(settings.sizes) > 0
        self._max_batch = max(settings.sizes)
        # Requests may share pages, so that together they can have more than there are.
        self._max_pages = self._max_batch * min(num_pages, -(-settings.max_seq_len // page_size))
        nothing = ForwardBatch.build(page_size, []).padded(self._max_batch)
        page_bytes = nothing.decodes.page_tables.itemsize * self._max_pages
        num_bytes = sum(each.nbytes for each in _arrays(nothing)) + page_bytes
        self._staging = Staging(device, num_bytes + _SPARE_BYTES)
        batch, _ = nothing.on(self._staging)
        self._addresses = [each.data_ptr() for each in _arrays(batch)]
        decodes = replace(batch.decodes, max_query_len=1, max_seq_len=settings.max_seq_len)
        batch = replace(batch, decodes=decodes)
        self._graphs: dict[int, Captured] = {}
        for size in sorted(set(settings.sizes), reverse=True):
            own = batch.first(size)

            def run(own: ForwardBatch = own) -> Tensor:
                return step(own)

            self._graphs[size] = settings.capture.capture(run)

    def hold(self, batch: ForwardBatch) -> bool:
        """Whether a batch on the host has one token for each request, and no more requests and
        pages than there is room for.
        """
        return (
            0 < len(batch.decodes) == len(batch) <= self._max_batch
            and batch.num_pages <= self._max_pages
        )

    def place(self, batch: ForwardBatch) -> ForwardBatch:
        """Bring a batch that they :meth:`hold` to where graphs read it; padded. One copy, not
        waited for: a step must have ended before the next one is placed.
        """
        placed, _ = batch.padded(self._max_batch).on(self._staging)
        assert [each.data_ptr() for each in _arrays(placed)] == self._addresses
        return placed

    def replay(self, num_requests: int) -> Tensor:
        """Run the step of the batch that was placed -> its requests' rows of the result, which the
        next step overwrites.
        """
        graph = self._graphs[min(size for size in self._graphs if size >= num_requests)]
        graph.replay()
        return graph.output[:num_requests]


def _arrays(batch: ForwardBatch) -> list[Tensor]:
    """What the kernels of a step read."""
    own = batch.decodes
    groups = (own.query_starts, own.query_lens, own.seq_lens, own.table_starts, own.page_tables)
    tokens = (batch.token_ids, batch.positions, batch.token_pages, batch.token_offsets)
    return [batch.progress_base, *tokens, *groups]
