"""How many of a pass's tokens stand where drafts were fed: those up to the first wrong draft.

The pass has the target's logits after each draft, and a token is drawn from every one of them, with
the numbers that it would have had without drafts. Draft j stands where it is the token drawn
before it. So the text is the very same with drafts as without, whoever made them; and a draft that
was certain (a draft model's best token, an n-gram) stands with the probability p(draft), which is
what the rejection rule min(1, p / q) gives it with q = 1. Source of the rule: Leviathan et al.
2023, "Fast Inference from Transformers via Speculative Decoding", algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["count_standing"]


def count_standing(tokens: Sequence[int], drafts: Sequence[int | None]) -> int:
    """How many of a request's drawn tokens [D + 1] stand behind its drafts [D]: 1 to D + 1."""
    for place, draft in enumerate(drafts):
        if tokens[place] != draft:
            return place + 1
    return len(drafts) + 1
