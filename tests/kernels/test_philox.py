"""Philox4x32-10 against its authors' known answers, and the number that a token draws."""

from __future__ import annotations

import pytest

from pdx.kernels.reference.philox import philox4x32, token_uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (ONES, ONES, ONES, ONES),
            (ONES, ONES),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == expected


def test_token_uniform_takes_the_first_word_of_seed_and_index() -> None:
    assert token_uniform(0, 0) == (0x6627E8D5 + 0.5) / 2**32
    word = philox4x32((7, 1, 0, 0), (5, 3))[0]
    assert token_uniform((3 << 32) | 5, (1 << 32) | 7) == (word + 0.5) / 2**32


def test_token_uniform_stays_inside_zero_and_one_and_looks_uniform() -> None:
    values = [token_uniform(2**64 - 1, i) for i in range(4000)]
    assert 0 < min(values) < 0.01
    assert 0.99 < max(values) < 1
    assert abs(sum(values) / len(values) - 0.5) < 0.02
    assert len(set(values)) == len(values)
