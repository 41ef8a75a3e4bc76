"""Who comes next: admission is fair to all peers, prefill to short and long prompts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from pdx.scheduler.sequence import Sequence

__all__ = ["admission_order", "prefill_order"]

#: After so many passes without a chunk a prompt counts as one length class shorter, so that short
#: ones never hold it up for ever.
_PASSES_A_CLASS = 8


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


def prefill_order(sequences: Iterable[Sequence], chunk_len: int) -> list[Sequence]:
    """Shorter length classes first (what is left, in doublings of a chunk); equals as they are."""

    def length_class(sequence: Sequence) -> int:
        left = sequence.prefill_len - sequence.num_computed
        return (left // chunk_len).bit_length() - sequence.num_passed_over // _PASSES_A_CLASS

    return sorted(sequences, key=length_class)
