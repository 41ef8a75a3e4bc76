"""A decode step as captured graphs: one for each of a few batch sizes, all over the same buffers.

A replay has no Python, so its launches' arguments are what they were: what changes from step to
step (tokens, places, tables, the base of the progress word) is read from ``StepBuffers``, which one
copy fills. A batch between two sizes is padded: padding appends nothing (its page is negative) and
attends to nothing (it has no rows); what comes out of its rows is garbage that nobody reads, as no
op mixes rows. A capture runs the step on nothing but padding. A rank's main thread; the first
capture compiles, so capture before serving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdx.kernels.device_batch import DeviceBatch, DevicePart, PartTables, PassTables
from pdx.kernels.page_tables import PageTables
from pdx.kernels.paged_batch import BatchPart, DecodeSteps, PagedBatch

__all__ = [
    "CaptureRefused",
    "Captured",
    "CudaGraphs",
    "GraphCapture",
    "StepBuffers",
    "StepGraphs",
]

#: Words of 32 bits that arrays begin at a multiple of: 16 bytes, which launches of passes without
#: graphs promise as well.
_ALIGNMENT = 4


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


class StepBuffers:
    """What a captured step reads, at fixed addresses, and the pinned memory that fills it.

    Args:
        max_batch: the largest batch size.
        max_pages: of all requests of a step together.
        max_context_len: of one request; launches are sized by it.
        device: of the buffers.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        max_pages: int,
        max_context_len: int,
        device: torch.device,
    ) -> None:
        self.max_batch, self._max_pages = max_batch, max_pages
        self._max_context_len = max_context_len
        rows = dict.fromkeys(("token_ids", "positions", "token_pages", "token_offsets"), max_batch)
        narrow = dict.fromkeys(("num_rows", "context_lens", "table_starts"), max_batch)
        # Pages last: a copy ends behind those of its step.
        layout = _layout({"pass_base": 1} | rows, narrow | {"page_indices": max_pages})
        self._first_page, num_words = layout["page_indices"].start, layout["page_indices"].stop
        self._host = torch.zeros(num_words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(num_words, dtype=torch.int32, device=device)
        wide = {"pass_base", *rows}
        self._on_host, self._on_device = (
            {
                name: memory[place].view(torch.int64) if name in wide else memory[place]
                for name, place in layout.items()
            }
            for memory in (self._host, self._device)
        )
        self._rows = torch.arange(max_batch, dtype=torch.int32, device=device)
        self._row_ids = torch.arange(max_batch, device=device)

    @property
    def pass_base(self) -> Tensor:
        """int64 [1]: of the progress word."""
        return self._on_device["pass_base"]

    def tokens(self, size: int) -> tuple[Tensor, Tensor]:
        """Token ids and positions, int64 [size] each."""
        return self._on_device["token_ids"][:size], self._on_device["positions"][:size]

    def batch(self, size: int) -> DeviceBatch:
        """A batch of ``size`` steps whose tables are these buffers."""
        at = self._on_device
        tables = PageTables(
            row_starts=self._rows[:size],
            num_rows=at["num_rows"][:size],
            context_lens=at["context_lens"][:size],
            table_starts=at["table_starts"][:size],
            page_indices=at["page_indices"],
            max_rows=1,
            max_context_len=self._max_context_len,
        )
        nothing = PageTables.of([], self._device.device)
        starts = nothing.row_starts
        appended = {name: at[name][:size] for name in ("token_pages", "token_offsets")}
        parts = (
            (self._row_ids[:size], tables, at["context_lens"][:size]),
            (self._row_ids[:0], nothing, starts),
        )
        steps, chunks = (
            BatchPart(
                rows=rows,
                batch=DevicePart(
                    spans=(),
                    decode_steps=DecodeSteps.of([]),
                    chunks=(),
                    tables=PartTables(spans=each, context_starts=begins),
                    **appended,
                ),
            )
            for rows, each, begins in parts
        )
        return DeviceBatch(
            spans=(),
            decode_steps=DecodeSteps.of([]),
            chunks=(),
            tables=PassTables(steps=tables, chunks=nothing),
            parts=(steps, chunks),
            **appended,
        )

    def hold(self, paged: PagedBatch) -> bool:
        """Whether a batch is of one token a request, and of no more requests and pages."""
        steps = paged.decode_steps
        return (
            len(paged.spans) == len(steps) <= self.max_batch
            and len(steps.page_indices) <= self._max_pages
        )

    def fill(self, token_ids: Tensor, positions: Tensor, paged: PagedBatch, pass_base: int) -> None:
        """Take a step's requests; places behind them become padding. One copy, not waited for.

        The pinned memory is read until the copy is done: let a step end before the next is filled.

        Args:
            token_ids: int64 [B], on the host.
            positions: int64 [B], likewise.
            paged: on the host; :meth:`hold` is true of it.
            pass_base: of the progress word.
        """
        assert self.hold(paged)
        steps, num_rows = paged.decode_steps, len(token_ids)
        columns = {
            "token_ids": token_ids,
            "positions": positions,
            "token_pages": paged.token_pages,
            "token_offsets": paged.token_offsets,
            "num_rows": torch.ones(num_rows),
            "context_lens": steps.context_lens,
            "table_starts": steps.table_starts,
        }
        for name, values in columns.items():
            column = self._on_host[name]
            column[:num_rows] = values
            column[num_rows:] = -1 if name == "token_pages" else 0
        num_pages = len(steps.page_indices)
        self._on_host["page_indices"][:num_pages] = steps.page_indices
        self._on_host["pass_base"][0] = pass_base
        end = self._first_page + num_pages
        self._device[:end].copy_(self._host[:end], non_blocking=True)


def _layout(wide: Mapping[str, int], narrow: Mapping[str, int]) -> dict[str, slice]:
    """Where arrays of 64-bit and of 32-bit numbers lie one after the other, in words of 32 bits."""
    places, end = {}, 0
    for name, words in [*((n, 2 * length) for n, length in wide.items()), *narrow.items()]:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + words
        places[name] = slice(begin, end)
    return places


class StepGraphs:
    """Graphs of one step for several batch sizes.

    Args:
        step: token ids [size], positions [size], batch -> [size, ...], by kernels alone.
        buffers: which it is given.
        sizes: batch sizes to capture, ``buffers.max_batch`` the largest.
        capture: makes the graphs; all of them, here and now, the largest first, so that the others
            find room in its memory.

    Raises:
        CaptureRefused: no graph can hold the step.
    """

    def __init__(
        self,
        step: Callable[[Tensor, Tensor, DeviceBatch], Tensor],
        buffers: StepBuffers,
        sizes: Sequence[int],
        capture: GraphCapture,
    ) -> None:
        assert max(sizes) == buffers.max_batch and min(sizes) > 0
        self._buffers = buffers
        nothing = torch.zeros(0, dtype=torch.int64)
        buffers.fill(nothing, nothing, PagedBatch.build(1, []), 0)
        self._graphs: dict[int, Captured] = {}
        for size in sorted(set(sizes), reverse=True):
            tokens, batch = buffers.tokens(size), buffers.batch(size)

            def run(tokens: tuple[Tensor, Tensor] = tokens, batch: DeviceBatch = batch) -> Tensor:
                return step(*tokens, batch)

            self._graphs[size] = capture.capture(run)

    def run(
        self, token_ids: Tensor, positions: Tensor, paged: PagedBatch, pass_base: int
    ) -> Tensor:
        """One step of 1 to ``max_batch`` requests -> their rows of the step's result, which the
        next step overwrites. Arguments are :meth:`StepBuffers.fill`'s.
        """
        num_rows = len(token_ids)
        size = min(size for size in self._graphs if size >= num_rows)
        self._buffers.fill(token_ids, positions, paged, pass_base)
        graph = self._graphs[size]
        graph.replay()
        return graph.output[:num_rows]
