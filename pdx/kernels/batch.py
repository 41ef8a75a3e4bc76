"""One forward pass as arrays: its tokens, and the requests whose pages they are appended to.

The one form in which a pass reaches models and ops, on every device. The rank's main thread builds
it on the host (``pdx.runner.requests``); ops read it where their device does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from pdx.kernels.staging import Staging

__all__ = ["ForwardBatch", "RequestGroup"]

Ints = NDArray[np.int32]
_NOTHING: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestGroup:
    """B requests that attention treats alike. Their rows lie side by side in the pass's tensors.

    The arrays are int32. A place whose ``query_lens`` is 0 is unused, because a captured graph's
    batch is padded: nothing of it is read or written.
    """

    #: The group's rows of the pass's [T, ...] tensors.
    rows: slice
    #: [B]: each request's first row, counted from the group's first one, and how many rows it has.
    #: They are the last tokens of its sequence.
    query_starts: Tensor
    query_lens: Tensor
    #: [B]: tokens in KV memory once this pass has appended its own.
    seq_lens: Tensor
    #: [B]: where each sequence begins if the group's sequences lie one behind the other.
    seq_starts: Tensor
    #: [B]: where the request's pages begin in ``page_tables``, which may hold others between them.
    table_starts: Tensor
    page_tables: Tensor
    #: Bounds on what ``query_lens`` and ``seq_lens`` hold, by which launches are sized.
    max_query_len: int
    max_seq_len: int
    #: The sum of ``seq_lens``.
    total_seq_len: int

    def __len__(self) -> int:
        return len(self.query_starts)

    def each(self, page_size: int) -> Iterator[tuple[slice, int, Tensor]]:
        """Each request's rows, counted as ``query_starts`` are, the length of its sequence,
        and the pages that hold it. This asks the arrays for numbers: only for ops of the host.
        """
        columns = (self.query_starts, self.query_lens, self.seq_lens, self.table_starts)
        for first, num_rows, seq_len, begin in zip(*(c.tolist() for c in columns), strict=True):
            pages = self.page_tables[begin : begin - (-seq_len // page_size)]
            yield slice(first, first + num_rows), seq_len, pages


_NO_REQUESTS = RequestGroup(
    **dict.fromkeys(
        ("query_starts", "query_lens", "seq_lens", "seq_starts", "table_starts", "page_tables"),
        torch.zeros(0, dtype=torch.int32),
    ),
    rows=slice(0, 0),
    max_query_len=0,
    max_seq_len=0,
    total_seq_len=0,
)
#: What a group has on a device, beside the page tables.
_COLUMNS = ("query_starts", "query_lens", "seq_lens", "seq_starts", "table_starts")
#: What a batch has there of its tokens, and its groups.
_TOKENS = ("token_ids", "positions", "token_pages", "token_offsets")
_GROUPS = ("decodes", "chunks")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """T tokens of some requests: first the rows of the requests that decode, then the chunks."""

    #: int32 [T] each: the token, its place in its sequence, and where its K and V are appended: a
    #: page (below 0: this row is padding and is appended nowhere) and a place in it.
    token_ids: Tensor
    positions: Tensor
    token_pages: Tensor
    token_offsets: Tensor
    #: int64 [1]: the pass's first progress word, which kernels publish from (``pdx.kv.progress``).
    progress_base: Tensor
    #: Requests with few rows over all of their sequence: a token, and the drafts behind it.
    decodes: RequestGroup
    #: The other requests.
    chunks: RequestGroup
    page_size: int

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def groups(self) -> tuple[RequestGroup, RequestGroup]:
        """Both, in the order of their rows."""
        return self.decodes, self.chunks

    @property
    def num_pages(self) -> int:
        """Pages of all sequences together. Of a batch on the host."""
        return sum(int(_num_pages(each, self.page_size).sum()) for each in self.groups)

    @classmethod
    def of(
        cls,
        *,
        page_size: int,
        decode_rows: int,
        token_ids: Ints,
        begins: Ints,
        query_lens: Ints,
        table_starts: Ints,
        page_tables: Ints,
        progress_base: int = 0,
    ) -> ForwardBatch:
        """From arrays of the host, which it keeps.

        Args:
            page_size: tokens of a page.
            decode_rows: a request with more rows than these is a chunk.
            token_ids: [T].
            begins: [B]: tokens of each sequence before this pass. Chunks come last.
            query_lens: [B].
            table_starts: [B], into ``page_tables``, which may be longer than the sequences need.
            page_tables: not empty.
            progress_base: the pass's first progress word.
        """
        is_chunk = query_lens > decode_rows
        num_decodes = len(is_chunk) - int(np.count_nonzero(is_chunk))
        assert not is_chunk[:num_decodes].any(), "a chunk stands before a request that decodes"
        starts, seq_lens = _starts(query_lens), begins + query_lens
        positions = np.arange(len(token_ids), dtype=np.int32)
        positions += np.repeat(begins - starts, query_lens)
        page_idxs, offsets = np.divmod(positions, np.int32(page_size))
        token_pages = page_tables[np.repeat(table_starts, query_lens) + page_idxs]
        num_rows = int(starts[num_decodes]) if num_decodes < len(starts) else len(token_ids)
        tables = torch.from_numpy(page_tables)

        def group(own: slice, rows: slice) -> RequestGroup:
            lens, seqs = query_lens[own], seq_lens[own]
            if not len(lens):
                return replace(_NO_REQUESTS, rows=rows, page_tables=tables)
            return RequestGroup(
                rows=rows,
                query_starts=torch.from_numpy(starts[own] - starts[own.start]),
                query_lens=torch.from_numpy(lens),
                seq_lens=torch.from_numpy(seqs),
                seq_starts=torch.from_numpy(_starts(seqs)),
                table_starts=torch.from_numpy(table_starts[own]),
                page_tables=tables,
                max_query_len=int(lens.max()),
                max_seq_len=int(seqs.max()),
                total_seq_len=int(seqs.sum()),
            )

        return cls(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            token_pages=torch.from_numpy(token_pages),
            token_offsets=torch.from_numpy(offsets),
            progress_base=torch.tensor([progress_base]),
            decodes=group(slice(0, num_decodes), slice(0, num_rows)),
            chunks=group(slice(num_decodes, None), slice(num_rows, len(token_ids))),
            page_size=page_size,
        )

    @classmethod
    def build(
        cls,
        page_size: int,
        requests: Sequence[tuple[int, int, Sequence[int]]],
        *,
        decode_rows: int = 1,
        token_ids: Sequence[int] | None = None,
    ) -> ForwardBatch:
        """From (tokens before this pass, tokens of this pass, page table) of each request.

        Page tables may be longer than the sequences. Without ``token_ids`` they are all 0.
        """
        for begin, num_tokens, table in requests:
            assert len(table) * page_size >= begin + num_tokens, "a page table is too short"
        query_lens = _ints([num_tokens for _, num_tokens, _ in requests])
        num_tokens = int(query_lens.sum())
        return cls.of(
            page_size=page_size,
            decode_rows=decode_rows,
            token_ids=_ints([0] * num_tokens if token_ids is None else token_ids),
            begins=_ints([begin for begin, _, _ in requests]),
            query_lens=query_lens,
            table_starts=_starts(_ints([len(table) for *_, table in requests])),
            # One entry at least: a kernel may be given no pointer to nothing.
            page_tables=_ints([page for *_, table in requests for page in table] or [0]),
        )

    def on(
        self, staging: Staging | None, more: Mapping[str, Tensor] = _NOTHING
    ) -> tuple[ForwardBatch, Mapping[str, Tensor]]:
        """This batch, and other arrays, where a device reads them: one copy, not waited for.

        Args:
            staging: the way to the device; None: ops read the host's memory, and all stays there.
            more: arrays of the host, which go along.
        """
        if staging is None:
            return self, more
        packed = self._with_packed_tables()
        arrays = {"progress_base": packed.progress_base}
        arrays |= {name: getattr(packed, name) for name in _TOKENS}
        for idx, group in enumerate(packed.groups):
            arrays |= {f"{idx}.{name}": getattr(group, name) for name in _COLUMNS}
        # The page tables come last: what lies before them has the same place in batches of one
        # shape, which captured graphs rely on.
        arrays |= {"page_tables": packed.decodes.page_tables, **more}
        there = staging.upload(arrays)
        moved: dict[str, Any] = {name: there[name] for name in ("progress_base", *_TOKENS)}
        for idx, (place, group) in enumerate(zip(_GROUPS, packed.groups, strict=True)):
            columns: dict[str, Any] = {name: there[f"{idx}.{name}"] for name in _COLUMNS}
            moved[place] = replace(group, page_tables=there["page_tables"], **columns)
        return replace(packed, **moved), {name: there[name] for name in more}

    def padded(self, size: int) -> ForwardBatch:
        """With unused places up to ``size`` requests and rows. Of requests with a row each."""
        assert len(self.decodes) == len(self) <= size
        padded = self._resized(size, lambda array: pad(array, (0, size - len(array))))
        padded.token_pages[len(self) :] = -1
        return padded

    def first(self, size: int) -> ForwardBatch:
        """The first requests and rows of a batch that is :meth:`padded`."""
        return self._resized(size, lambda array: array[:size])

    def _resized(self, size: int, change: Callable[[Tensor], Tensor]) -> ForwardBatch:
        columns: dict[str, Any] = {name: change(getattr(self.decodes, name)) for name in _COLUMNS}
        resized: dict[str, Any] = {name: change(getattr(self, name)) for name in _TOKENS}
        return replace(
            self,
            decodes=replace(self.decodes, rows=slice(0, size), **columns),
            chunks=replace(self.chunks, rows=slice(size, size)),
            **resized,
        )

    def _with_packed_tables(self) -> ForwardBatch:
        """With page tables that hold the sequences' pages and nothing else."""
        tables = self.decodes.page_tables.numpy()
        counts = [_num_pages(group, self.page_size) for group in self.groups]
        pieces: list[Ints] = [np.zeros(1, np.int32)]  # never empty: a kernel gets its address
        for group, nums in zip(self.groups, counts, strict=True):
            ends = zip(group.table_starts.tolist(), nums.tolist(), strict=True)
            pieces += [tables[start : start + num] for start, num in ends]
        packed = torch.from_numpy(np.concatenate(pieces))
        starts = 1 + _starts(np.concatenate(counts))
        own = np.split(starts, [len(self.decodes)])
        decodes, chunks = (
            replace(group, page_tables=packed, table_starts=torch.from_numpy(begins))
            for group, begins in zip(self.groups, own, strict=True)
        )
        return replace(self, decodes=decodes, chunks=chunks)


def _num_pages(group: RequestGroup, page_size: int) -> Ints:
    """[B], on the host."""
    nums: Ints = -(-group.seq_lens.numpy() // np.int32(page_size))
    return nums


def _starts(lengths: Ints) -> Ints:
    """Where each of some pieces begins that lie one behind the other."""
    ends: Ints = np.cumsum(lengths, dtype=np.int32)
    return ends - lengths


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int32)
