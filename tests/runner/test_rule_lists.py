"""Rules as lists: distinct tokens, what the output adds, rows without rules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from pdx.request.request import SamplingParams
from pdx.runner.logit_rules import LogitRules, rule_arrays

PARAMS = SamplingParams(
    max_tokens=9,
    repetition_penalty=1.5,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    logit_bias={2: 3.0, 7: -1.0},
    min_tokens=3,
    stop_token_ids=(7, 9, 9),
)
FIELDS = ("token_ids", "bias", "seen", "cost", "held")


def listed(sampling: SamplingParams, prompt: list[int]) -> LogitRules:
    rules = LogitRules.of(sampling, prompt, 20)
    assert rules is not None
    return rules


def by_row(
    rows: Sequence[tuple[LogitRules | None, Sequence[int]]],
) -> list[list[tuple[object, ...]]]:
    """Each row's tokens with all that they have, in the order of ids."""
    arrays = rule_arrays(rows)
    starts = arrays["starts"].tolist()
    tokens = list(zip(*(arrays[name].tolist() for name in FIELDS), strict=True))
    return [sorted(tokens[a:b]) for a, b in pairwise(starts)]


def test_tokens_are_distinct_and_keep_all_that_they_have() -> None:
    rules = listed(PARAMS, [1, 2, 2, 5])
    expected = [
        (1, 0.0, True, 0.0, False),
        (2, 3.0, True, 0.0, False),
        (4, 0.0, True, 1.0, False),
        (5, 0.0, True, 0.75, False),
        (7, -1.0, False, 0.0, False),
        (9, 0.0, False, 0.0, False),
    ]
    assert by_row([(rules, [5, 4, 4])]) == [expected]
    # The list itself stays: a step may be repeated.
    assert by_row([(rules, [5, 4, 4])]) == [expected]


def test_stop_tokens_are_held_until_there_are_enough() -> None:
    rules = listed(PARAMS, [1])
    held = [[row[0] for row in rows if row[4]] for rows in by_row([(rules, [5]), (rules, [5] * 3)])]
    assert held == [[7, 9], []]


def test_rows_keep_their_own() -> None:
    """Rows without rules among them; the same token in several."""
    only_output = listed(SamplingParams(max_tokens=9, presence_penalty=1.0), [1, 2])
    rows = [(None, ()), (listed(PARAMS, [1]), (4, 1)), (None, ()), (only_output, (4, 4, 3))]
    none, both, nothing, output = by_row(rows)
    assert none == nothing == []
    assert [row[0] for row in both] == [1, 2, 4, 7, 9]
    assert output == [(3, 0.0, True, 1.0, False), (4, 0.0, True, 1.0, False)]
    assert by_row([(only_output, ())]) == [[]]
    repetition = rule_arrays(rows)["repetition"]
    assert (repetition.tolist(), repetition.dtype) == ([1.0, 1.5, 1.0, 1.0], torch.float64)
