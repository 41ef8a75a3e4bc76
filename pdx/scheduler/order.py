"""The order of requests: admission is fair to all peers, prefill to short and long prompts.

Pure: whoever asks applies the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from pdx.scheduler.request import Request

__all__ = ["FilledChunk", "admission_order", "fill_chunk"]

#: After so many passes in which younger ones took of its tokens a prompt counts as one length class
#: shorter, so that they never hold it up for ever.
_PASSES_A_CLASS = 4


def admission_order(waiting: Collection[Request], active: Iterable[Request]) -> list[Request]:
    """First come, first served within a group; between groups, whoever has the fewest before it.

    A peer that sends a thousand prompts at once delays another peer's by one or two, not by all.
    """
    if len({request.group for request in waiting}) < 2:
        return list(waiting)
    before = Counter(request.group for request in active)
    ranked = []
    for request in waiting:
        ranked.append((before[request.group], request))
        before[request.group] += 1
    ranked.sort(key=lambda pair: pair[0])
    return [request for _, request in ranked]


class FilledChunk(NamedTuple):
    """The next pass's prompts."""

    #: How many tokens of each are computed.
    chosen: list[tuple[Request, int]]
    #: In how many passes younger ones have come first by then, where that changes.
    passed_over: list[tuple[Request, int]]


def fill_chunk(requests: Iterable[Request], chunk_len: int) -> FilledChunk:
    """Which prompts the next pass computes, and how many tokens of each.

    Shorter length classes come first (what is left of a prompt, in doublings); equals as they are.
    Longer ones fill the chunk up, but no further than to twice what the shortest class needs: who
    comes while a pass runs waits for it, and then no longer than twice what its own pass takes.

    Args:
        requests: the oldest first.
    """
    by_class = sorted(enumerate(requests), key=lambda pair: _length_class(pair[1]))
    shortest = _length_class(by_class[0][1]) if by_class else 0
    filled = FilledChunk([], [])
    room, is_capped, youngest = chunk_len, False, 0
    for age, request in by_class:
        if _length_class(request) > shortest and not is_capped:
            room, is_capped = min(room, chunk_len - room), True
        wanted = min(_num_left(request), chunk_len)
        num_tokens = min(wanted, room)
        if num_tokens == wanted:  # its turn: others come before it has the next one
            num_passes = max(0, request.num_passed_over - _PASSES_A_CLASS)
            filled.passed_over.append((request, num_passes))
        elif youngest > age:
            filled.passed_over.append((request, request.num_passed_over + 1))
        if num_tokens:
            filled.chosen.append((request, num_tokens))
            room, youngest = room - num_tokens, max(youngest, age)
    return filled


def _num_left(request: Request) -> int:
    return request.prefill_len - request.num_computed


def _length_class(request: Request) -> int:
    return _num_left(request).bit_length() - request.num_passed_over // _PASSES_A_CLASS
