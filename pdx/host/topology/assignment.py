"""Dealing columns out to rows at the least total cost. Pure; exact, on integers of any size."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["assign"]


def assign(costs: Sequence[Sequence[int]]) -> list[int]:
    """A column of its own for each row, so that the sum of costs is least.

    The Hungarian method with shortest augmenting paths, O(rows^2 x columns).

    Args:
        costs: rows of equal length, not more rows than columns.

    Returns:
        The column of each row.
    """
    num_columns = len(costs[0]) if costs else 0
    assert len(costs) <= num_columns or not costs
    # Potentials keep every reduced cost at 0 or above, and that of a chosen pair at 0.
    of_row, of_column = [0] * len(costs), [0] * num_columns
    row_of: dict[int, int] = {}
    for new_row in range(len(costs)):
        length: dict[int, int] = {}
        before: dict[int, int | None] = {}
        final: dict[int, int] = {}
        row, column, base = new_row, None, 0
        while True:
            for c in range(num_columns):
                way = base + costs[row][c] - of_row[row] - of_column[c]
                if c not in final and (c not in length or way < length[c]):
                    length[c], before[c] = way, column
            column = min(length.keys() - final.keys(), key=lambda c: (length[c], c))
            base = final[column] = length[column]
            if column not in row_of:
                break
            row = row_of[column]
        of_row[new_row] += base
        for c, way in final.items():
            of_column[c] -= base - way
            if c in row_of:
                of_row[row_of[c]] += base - way
        _shift(new_row, column, before, row_of)
    return [column for _, column in sorted((row, column) for column, row in row_of.items())]


def _shift(
    new_row: int, column: int, before: dict[int, int | None], row_of: dict[int, int]
) -> None:
    """Along the way back, each column takes the row of the one before it."""
    while (previous := before[column]) is not None:
        row_of[column] = row_of[previous]
        column = previous
    row_of[column] = new_row
