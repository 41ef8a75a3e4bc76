"""What simulated ranks compute instead of a model: KV values and tokens, by a few integer
operations that depend on everything that a model's would depend on. Pure.

Each position has a value that is mixed from its token and from the *state* before it; each layer,
head and part of its KV is that value times a factor of the place; the state is the weighted sum of
all KV found in the pages up to a position, modulo 2^64. So one word that is stale, missing or in
the wrong place changes the state, and with it every token that follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["VOCAB_SIZE", "SimulatedModel"]

VOCAB_SIZE = 1 << 16
_MASK = (1 << 64) - 1
_POSITION, _PLACE, _FACTOR = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9


def _mix(value: int) -> int:
    """The last step of splitmix64: every bit depends on every other."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


@cache
def _odd_numbers(seed: int, count: int) -> NDArray[np.uint64]:
    numbers = np.array([_mix(seed * (i + 1) & _MASK) | 1 for i in range(count)], np.uint64)
    numbers.flags.writeable = False
    return numbers


@cache
def _word_weights(
    num_layers: int,
    num_kv_heads: int,
    context_len: int,
    page_size: int,
    heads: tuple[int, int],
    shares: tuple[int, ...],
) -> NDArray[np.uint64]:
    num_pages = -(-context_len // page_size)
    places = _odd_numbers(_PLACE, num_layers * num_kv_heads * 2)
    places = places.reshape(1, num_layers, num_kv_heads, 2, 1)[:, :, slice(*heads)]
    counted = np.array([share & _MASK for share in shares], np.uint64)[:, None, None]
    positions = _odd_numbers(_POSITION, num_pages * page_size).reshape(
        num_pages, 1, 1, 1, page_size
    )
    return places * counted * positions


class SimulatedModel:
    """See the module's docstring."""

    def __init__(self, *, num_layers: int, num_kv_heads: int, context_len: int) -> None:
        shape = (num_layers, num_kv_heads, 2)
        num_places = num_layers * num_kv_heads * 2
        #: [L, Hkv, part]: what a position's value is multiplied by to make its KV.
        self.factors = _odd_numbers(_FACTOR, num_places).reshape(shape)
        #: [L, Hkv, part]: how much each place counts in the state.
        self.place_weights = _odd_numbers(_PLACE, num_places).reshape(shape)
        #: [context_len]
        self.position_weights = _odd_numbers(_POSITION, context_len)
        self._weights: list[int] = self.position_weights.tolist()
        self._scale = int((self.factors * self.place_weights).sum())
        self.context_len = context_len

    def word_weights(
        self, page_size: int, heads: tuple[int, int], shares: tuple[int, ...]
    ) -> NDArray[np.uint64]:
        """How much each word of a request's pages counts in the state, as a rank has them.

        Args:
            heads: the first one that the rank holds, and the one after the last.
            shares: how many times what it holds of each counts.

        Returns:
            [P, L, Hkv, part, S], for the pages of the longest context.
        """
        return _word_weights(
            *self.place_weights.shape[:2], self.context_len, page_size, heads, shares
        )

    def advance(self, state: int, position: int, token_id: int) -> tuple[int, int]:
        """One position: its value, and the state once its KV is there."""
        value = _mix(state + (token_id + 1) * _POSITION & _MASK)
        return value, state + self._weights[position] * value * self._scale & _MASK

    def state_after(self, token_ids: Iterable[int]) -> int:
        """The state after a whole text, as it should be."""
        state = 0
        for position, token_id in enumerate(token_ids):
            _, state = self.advance(state, position, token_id)
        return state

    @staticmethod
    def token(state: int) -> int:
        """The token that follows."""
        return _mix(state ^ _PLACE) % VOCAB_SIZE

    @staticmethod
    def logprob(state: int, token_id: int) -> float:
        """How likely a token is to follow."""
        return -(_mix(state ^ token_id) % 1000) / 100
