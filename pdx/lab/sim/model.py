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
