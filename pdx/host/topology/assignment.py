"""Dealing columns out to rows at the least total cost. Pure; exact, on integers of any size."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["assign"]


def assign(costs: Sequence[Sequence[int]]) -> list[int]:
    """A column of its own for each row, so that the sum of costs is least.

    The Hungarian method: rows come one after the other, and each takes the shortest way to a free
    column, over columns whose rows move on. O(rows^2 x columns).

    Args:
        costs: rows of equal length, not more rows than columns.

    Returns:
        The column of each row.
    """
    num_columns = len(costs[0]) if costs else 0
    assert len(costs) <= num_columns or not costs
    # Column 0 is where the new row begins; row 0 stands for none.
    of_row, of_column = [0] * (len(costs) + 1), [0] * (num_columns + 1)
    row_of, columns = [0] * (num_columns + 1), range(1, num_columns + 1)
    for new_row in range(1, len(costs) + 1):
        row_of[0], column = new_row, 0
        length: list[float] = [math.inf] * (num_columns + 1)
        before = [0] * (num_columns + 1)
        open_columns, passed = set(columns), [0]
        while row := row_of[column]:
            for c in open_columns:
                way = costs[row - 1][c - 1] - of_row[row] - of_column[c]
                if way < length[c]:
                    length[c], before[c] = way, column
            column = min(open_columns, key=lambda c: (length[c], c))
            step = int(length[column])
            for c in passed:
                of_row[row_of[c]] += step
                of_column[c] -= step
            for c in open_columns:
                length[c] -= step
            open_columns.remove(column)
            passed.append(column)
        while column:  # each column on the way takes the row of the one before it
            row_of[column] = row_of[before[column]]
            column = before[column]
    return [column for _, column in sorted((row_of[c], c - 1) for c in columns if row_of[c])]
