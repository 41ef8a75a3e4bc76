"""Page tables that live across passes: growth, reuse of regions, none changes another."""

from __future__ import annotations

import random

import pytest

from pdx.runner.page_tables import PageTable, PageTableArray


def pages_of(tables: PageTableArray, table: PageTable) -> list[int]:
    pages: list[int] = tables.pages[table.start : table.start + table.num_pages].tolist()
    return pages


def test_a_new_page_shifts_nothing() -> None:
    tables = PageTableArray()
    first, second = PageTable(), PageTable()
    tables.append(first, list(range(15)))
    tables.append(second, [40, 41])
    places = first.start, second.start
    tables.append(first, [15])
    assert (first.start, second.start) == places
    assert (pages_of(tables, first), pages_of(tables, second)) == (list(range(16)), [40, 41])


def test_a_table_that_outgrows_its_region_leaves_it_to_the_next() -> None:
    tables = PageTableArray()
    table, other = PageTable(), PageTable()
    tables.append(table, list(range(16)))
    old = table.start
    tables.append(table, [16])
    assert (table.start != old, table.capacity) == (True, 32)
    assert pages_of(tables, table) == list(range(17))
    tables.append(other, [3])
    assert other.start == old
    tables.free(other)
    tables.append(other := PageTable(), [4])
    assert other.start == old


@pytest.mark.parametrize("seed", range(20))
def test_tables_keep_their_own_pages(seed: int) -> None:
    rng = random.Random(seed)
    tables, live = PageTableArray(), dict[int, tuple[PageTable, list[int]]]()
    for idx in range(400):
        if live and rng.random() < 0.2:
            table, _ = live.pop(rng.choice(list(live)))
            tables.free(table)
        if rng.random() < 0.4:
            live[idx] = (PageTable(), [])
        if live:
            table, pages = rng.choice(list(live.values()))
            new = [rng.randrange(10**6) for _ in range(rng.choice([0, 1, 1, 5, 300]))]
            tables.append(table, new)
            pages += new
        assert all(pages_of(tables, table) == pages for table, pages in live.values())
    most = sum(table.capacity for table, _ in live.values())
    assert len(tables.pages) <= 64 * max(most, 1024), "regions are not reused"
