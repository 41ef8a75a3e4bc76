"""Philox4x32-10, a random generator without state: words = f(counter, key). Any process.

Source: Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3". Output token i of a
request draws from counter i under the request's seed, so a preemption, a retry or another decoder
repeats it, on any device.
"""

from __future__ import annotations

__all__ = ["philox4x32", "token_uniform"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Four random 32-bit words for a counter of four and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def token_uniform(seed: int, output_idx: int) -> float:
    """The number in (0, 1) that output token ``output_idx`` of a request with ``seed`` draws.

    Key: the seed's low and high word. Counter: the index's low and high word, 0, 0. The first word
    w of the result gives (w + 1/2) / 2^32, which is exact in float64.
    """
    counter = (output_idx & _MASK, output_idx >> 32, 0, 0)
    word = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))[0]
    return (word + 0.5) / 2**32
