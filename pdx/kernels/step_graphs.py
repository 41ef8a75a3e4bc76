"""A decode step as captured graphs: one for each of a few batch sizes, all over the same buffers.

A replay has no Python, so its launches' arguments are what they were: what changes from step to
step (tokens, places, tables, the base of the progress word) is read from ``StepBuffers``, which one
copy fills. A batch between two sizes is padded: padding appends nothing (its page is negative) and
attends to nothing (it has no rows); what comes out of its rows is garbage that nobody reads, as no
op mixes rows. A rank's main thread; the first capture compiles, so capture before serving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdx.kernels.device_batch import DeviceBatch, DevicePart, PartTables, PassTables
from pdx.kernels.page_tables import PageTables
from pdx.kernels.paged_batch import BatchPart, DecodeSteps

__all__ = ["Captured", "CudaGraphs", "DecodeRow", "GraphCapture", "StepBuffers", "StepGraphs"]


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
        """Run once to compile and to make what is made at first use, then once more, captured."""


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

    def capture(self, run: Callable[[], Tensor]) -> Captured:
        """See :class:`GraphCapture`."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
        return _CudaGraph(output, graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """One request of a step."""

    token_id: int
    #: The token's place in its request: so many tokens are in KV memory before it.
    position: int
    page_indices: Sequence[int]


class StepBuffers:
    """What a captured step reads, at fixed addresses, and the pinned memory that fills it.

    Args:
        max_batch: the largest batch size.
        max_pages: of all requests of a step together.
        page_size: tokens in a page.
        max_context_len: of one request; launches are sized by it.
        device: of the buffers.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        max_pages: int,
        page_size: int,
        max_context_len: int,
        device: torch.device,
    ) -> None:
        self.max_batch, self.page_size, self._max_pages = max_batch, page_size, max_pages
        self._max_context_len = max_context_len
        # In words of 32 bits; those of 64 come first, so that they are aligned.
        wide = {"pass_base": 1, "token_ids": max_batch, "positions": max_batch}
        wide |= {"token_pages": max_batch, "token_offsets": max_batch}
        narrow = {"num_rows": max_batch, "context_lens": max_batch, "table_starts": max_batch}
        narrow |= {"page_indices": max_pages}
        num_words = 2 * sum(wide.values()) + sum(narrow.values())
        self._host = torch.zeros(num_words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._on_host: dict[str, Tensor] = {}
        self._on_device: dict[str, Tensor] = {}
        for memory, views in ((self._host, self._on_host), (self._device, self._on_device)):
            begin = 0
            for name, length in (wide | narrow).items():
                words = 2 * length if name in wide else length
                part = memory[begin : begin + words]
                views[name] = part.view(torch.int64) if name in wide else part
                begin += words
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

    def fill(self, rows: Sequence[DecodeRow], pass_base: int) -> None:
        """Take a step's requests; places behind them become padding. One copy, not waited for.

        The pinned memory is read until the copy is done: let a step end before the next is filled.
        """
        num_pages = sum(len(row.page_indices) for row in rows)
        assert len(rows) <= self.max_batch and num_pages <= self._max_pages
        at, padding = self._on_host, [0] * (self.max_batch - len(rows))
        pages = [row.page_indices[row.position // self.page_size] for row in rows]
        starts, begin = [], 0
        for row in rows:
            starts.append(begin)
            begin += len(row.page_indices)
        columns = {
            "token_ids": [row.token_id for row in rows],
            "positions": [row.position for row in rows],
            "token_offsets": [row.position % self.page_size for row in rows],
            "num_rows": [1] * len(rows),
            "context_lens": [row.position + 1 for row in rows],
            "table_starts": starts,
        }
        for name, values in columns.items():
            at[name].copy_(torch.tensor([*values, *padding], dtype=at[name].dtype))
        at["token_pages"].copy_(torch.tensor([*pages, *(-1 for _ in padding)]))
        indices = [page for row in rows for page in row.page_indices]
        at["page_indices"][: len(indices)].copy_(torch.tensor(indices, dtype=torch.int32))
        at["pass_base"].fill_(pass_base)
        self._device.copy_(self._host, non_blocking=True)


class StepGraphs:
    """Graphs of one step for several batch sizes.

    Args:
        step: token ids [size], positions [size], batch -> [size, ...], by kernels alone.
        buffers: which it is given.
        sizes: batch sizes to capture, ``buffers.max_batch`` the largest.
        capture: makes the graphs; all of them, here and now, the largest first, so that the others
            find room in its memory.
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
        buffers.fill([], 0)
        self._graphs: dict[int, Captured] = {}
        for size in sorted(set(sizes), reverse=True):
            tokens, batch = buffers.tokens(size), buffers.batch(size)

            def run(tokens: tuple[Tensor, Tensor] = tokens, batch: DeviceBatch = batch) -> Tensor:
                return step(*tokens, batch)

            self._graphs[size] = capture.capture(run)

    def run(self, rows: Sequence[DecodeRow], pass_base: int) -> Tensor:
        """One step of 1 to ``max_batch`` requests -> their rows of the step's result, which the
        next step overwrites.
        """
        size = min(size for size in self._graphs if size >= len(rows))
        self._buffers.fill(rows, pass_base)
        graph = self._graphs[size]
        graph.replay()
        return graph.output[: len(rows)]
