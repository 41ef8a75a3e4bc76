"""Slots never repeat a pair early."""

from __future__ import annotations

from pdx.messenger.slots import SlotTable


def test_slot_pairs_come_back_as_late_as_the_design_says() -> None:
    table = SlotTable(num_slots=16, num_generations=4, num_free_kept=6)
    seen: dict[tuple[int, int], int] = {}
    shortest = 10**9
    for turn in range(1000):
        pair = table.take()
        assert pair is not None and pair[0] != 0
        if pair in seen:
            shortest = min(shortest, turn - seen[pair])
        seen[pair] = turn
        table.give_back(pair[0])
    assert shortest >= 6 * 4


def test_slots_run_out_before_the_reserve_is_touched() -> None:
    table = SlotTable(num_slots=10, num_generations=4, num_free_kept=3)
    taken = []
    while (pair := table.take()) is not None:
        taken.append(pair)
    assert len(taken) == 6
    table.give_back(taken[0][0])
    assert table.take() is not None
