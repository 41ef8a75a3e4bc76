"""Who comes next: admission is fair to all peers, prefill to short and long prompts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from pdx.scheduler.sequence import Sequence

__all__ = ["admission_order", "fill_chunk"]

#: After so many passes in which younger ones took of its tokens a prompt counts as one length class
#: shorter, so that they never hold it up for ever.
_PASSES_A_CLASS = 4


def admission_order(waiting: Collection[Sequence], active: Iterable[Sequence]) -> list[Sequence]:
    """First come, first served within a group; between groups, whoever has the fewest before it.

    A peer that sends a thousand prompts at once delays another peer's by one or two, not by all.
    """
    if len({sequence.group for sequence in waiting}) < 2:
        return list(waiting)
    before = Counter(sequence.group for sequence in active)
    ranked = []
    for sequence in waiting:
        ranked.append((before[sequence.group], sequence))
        before[sequence.group] += 1
    ranked.sort(key=lambda pair: pair[0])
    return [sequence for _, sequence in ranked]


def fill_chunk(sequences: Iterable[Sequence], chunk_len: int) -> list[tuple[Sequence, int]]:
    """Which prompts the next pass computes, and how many tokens of each.

    Shorter length classes come first (what is left of a prompt, in doublings); equals as they are.
    Longer ones fill the chunk up, but no further than to twice what the shortest class needs: who
    comes while a pass runs waits for it, and then no longer than twice what its own pass takes.

    Args:
        sequences: the oldest first.
    """
    by_class = sorted(enumerate(sequences), key=lambda pair: _length_class(pair[1]))
    shortest = _length_class(by_class[0][1]) if by_class else 0
    chosen: list[tuple[Sequence, int]] = []
    room, is_capped, youngest = chunk_len, False, 0
    for age, sequence in by_class:
        if _length_class(sequence) > shortest and not is_capped:
            room, is_capped = min(room, chunk_len - room), True
        wanted = min(_num_left(sequence), chunk_len)
        num_tokens = min(wanted, room)
        if num_tokens == wanted:  # its turn: others come before it has the next one
            sequence.num_passed_over = max(0, sequence.num_passed_over - _PASSES_A_CLASS)
        elif youngest > age:
            sequence.num_passed_over += 1
        if num_tokens:
            chosen.append((sequence, num_tokens))
            room, youngest = room - num_tokens, max(youngest, age)
    return chosen


def _num_left(sequence: Sequence) -> int:
    return sequence.prefill_len - sequence.num_computed


def _length_class(sequence: Sequence) -> int:
    return _num_left(sequence).bit_length() - sequence.num_passed_over // _PASSES_A_CLASS
