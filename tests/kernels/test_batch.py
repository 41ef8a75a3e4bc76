"""A pass as arrays: its two groups, where tokens are appended, the copy to a device, padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pdx.kernels.batch import ForwardBatch, RequestGroup
from pdx.kernels.staging import Staging

S = 4
CPU = torch.device("cpu")


def numbers(group: RequestGroup, name: str) -> list[int]:
    values: Tensor = getattr(group, name)
    assert values.dtype == torch.int32
    return values.tolist()


def pages_of(group: RequestGroup) -> list[list[int]]:
    return [pages.tolist() for _, _, pages in group.each(S)]


def mixed(decode_rows: int = 2) -> ForwardBatch:
    """Two requests that decode, one of them with a draft, and two chunks; page tables may be
    longer than the sequences.
    """
    requests = [(5, 1, [9, 8, 7]), (7, 2, [1, 2, 3]), (0, 6, [4, 5]), (3, 3, [6, 0, 10])]
    return ForwardBatch.build(S, requests, decode_rows=decode_rows, token_ids=range(12))


def test_groups_are_the_requests_with_few_rows_and_the_chunks() -> None:
    decodes, chunks = mixed().groups
    assert (decodes.rows, chunks.rows) == (slice(0, 3), slice(3, 12))
    assert (numbers(decodes, "query_starts"), numbers(decodes, "query_lens")) == ([0, 1], [1, 2])
    assert (numbers(chunks, "query_starts"), numbers(chunks, "query_lens")) == ([0, 6], [6, 3])
    assert (numbers(decodes, "seq_lens"), numbers(decodes, "seq_starts")) == ([6, 9], [0, 6])
    assert (numbers(chunks, "seq_lens"), numbers(chunks, "seq_starts")) == ([6, 6], [0, 6])
    assert (pages_of(decodes), pages_of(chunks)) == ([[9, 8], [1, 2, 3]], [[4, 5], [6, 0]])
    bounds = [(g.max_query_len, g.max_seq_len, g.total_seq_len) for g in (decodes, chunks)]
    assert bounds == [(2, 9, 15), (6, 6, 12)]
    assert mixed().num_pages == 9


def test_each_token_knows_its_position_and_its_place_in_a_page() -> None:
    batch = mixed()
    assert len(batch) == 12
    assert batch.positions.tolist() == [5, 7, 8, 0, 1, 2, 3, 4, 5, 3, 4, 5]
    assert batch.token_pages.tolist() == [8, 2, 3, 4, 4, 4, 4, 5, 5, 6, 0, 0]
    assert batch.token_offsets.tolist() == [1, 3, 0, 0, 1, 2, 3, 0, 1, 3, 0, 1]


@pytest.mark.parametrize(("decode_rows", "num_decodes"), [(0, 0), (1, 1), (2, 2), (6, 4)])
def test_rows_of_a_request_that_decodes_are_a_parameter(decode_rows: int, num_decodes: int) -> None:
    requests = [(5, 1, [9, 8]), (7, 2, [1, 2, 3]), (3, 3, [6, 0]), (0, 6, [4, 5])]
    batch = ForwardBatch.build(S, requests, decode_rows=decode_rows)
    assert [len(group) for group in batch.groups] == [num_decodes, 4 - num_decodes]


def test_no_requests_and_a_chunk_out_of_place() -> None:
    nothing = ForwardBatch.build(S, [])
    assert (len(nothing), len(nothing.decodes), len(nothing.chunks)) == (0, 0, 0)
    moved, _ = nothing.on(Staging(CPU))
    assert len(moved) == 0
    with pytest.raises(AssertionError, match="a chunk stands before"):
        ForwardBatch.build(S, [(0, 6, [4, 5]), (5, 1, [9, 8])])


def slack() -> ForwardBatch:
    """Page tables with others' pages between them, as a rank's table of requests has them."""
    tables = np.full(64, 77, np.int32)
    tables[8:10], tables[32:35], tables[48:50] = (9, 8), (1, 2, 3), (4, 5)
    return ForwardBatch.of(
        page_size=S,
        decode_rows=1,
        token_ids=np.arange(8, dtype=np.int32),
        begins=np.array([5, 8, 0], np.int32),
        query_lens=np.array([1, 1, 6], np.int32),
        table_starts=np.array([8, 32, 48], np.int32),
        page_tables=tables,
        progress_base=2**40,
    )


def test_a_device_gets_all_of_it_in_one_copy_without_the_slack() -> None:
    batch, more = slack(), {"more": torch.tensor([0.5], dtype=torch.float64)}
    moved, with_it = batch.on(Staging(CPU), more)
    assert moved.token_pages.tolist() == batch.token_pages.tolist() == [8, 3, 4, 4, 4, 4, 5, 5]
    assert int(moved.progress_base) == 2**40
    assert with_it["more"].tolist() == [0.5]
    for ours, theirs in zip(moved.groups, batch.groups, strict=True):
        assert pages_of(ours) == pages_of(theirs)
        assert len(ours.page_tables) == 8, "its pages, and one that no kernel reads"
        for name in ("query_starts", "query_lens", "seq_lens", "seq_starts"):
            assert numbers(ours, name) == numbers(theirs, name)
            assert getattr(ours, name).data_ptr() != getattr(theirs, name).data_ptr()
    memory = moved.token_ids.untyped_storage().data_ptr()
    assert with_it["more"].untyped_storage().data_ptr() == memory
    assert moved.chunks.page_tables.untyped_storage().data_ptr() == memory


def test_ops_of_the_host_read_its_own_arrays() -> None:
    batch = slack()
    more = {"more": torch.zeros(1)}
    assert batch.on(None, more) == (batch, more)


def test_padding_appends_nothing_and_attends_to_nothing() -> None:
    batch = ForwardBatch.build(S, [(5, 1, [9, 8]), (0, 1, [3])], token_ids=[40, 41])
    padded = batch.padded(4)
    assert padded.token_ids.tolist() == [40, 41, 0, 0]
    assert padded.token_pages.tolist() == [8, 3, -1, -1]
    assert numbers(padded.decodes, "query_lens") == [1, 1, 0, 0]
    assert numbers(padded.decodes, "seq_lens") == [6, 1, 0, 0]
    assert (padded.decodes.rows, padded.chunks.rows) == (slice(0, 4), slice(4, 4))
    first = padded.first(3)
    assert (len(first), len(first.decodes), first.decodes.rows) == (3, 3, slice(0, 3))
    assert first.token_ids.data_ptr() == padded.token_ids.data_ptr()


def test_padded_batches_come_to_the_same_addresses() -> None:
    staging = Staging(CPU, 4096)
    addresses = set()
    for lengths in ([], [1], [9, 4], [40, 1, 1]):
        requests = [(n - 1, 1, list(range(-(-n // S)))) for n in lengths]
        moved, _ = ForwardBatch.build(S, requests).padded(3).on(staging)
        own = moved.decodes
        arrays = (moved.token_ids, moved.progress_base, own.seq_lens, own.page_tables)
        addresses.add(tuple(each.data_ptr() for each in arrays))
    assert len(addresses) == 1
