"""Log-probabilities of a prompt's own tokens. The leader rank's main thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdx.errors import InternalError
from pdx.kernels.ops import LikeliestOp
from pdx.request.batch import PromptScores, ScoredToken

__all__ = ["ScoreSpan", "score_prompts"]

#: Logits held at once: 32 MiB in float32. A chunk of 8,192 tokens and a vocabulary of 150,000 would
#: take 4.6 GiB.
_BLOCK_VALUES = 1 << 23


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSpan:
    """Rows of a pass that score the prompt of one request: row i of it scores target i."""

    request_id: int
    #: First row in the pass's [T, ...] tensors.
    row: int
    #: Position of the first target in the request: 1 or later.
    first_position: int
    #: The tokens that follow the rows' own; at least one.
    target_ids: tuple[int, ...]
    #: How many of the most likely tokens to report with each.
    num_top: int


def score_prompts(
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    likeliest: LikeliestOp,
    spans: Sequence[ScoreSpan],
    vocab_size: int,
) -> list[PromptScores]:
    """Scores of all spans, by the raw logits.

    Args:
        hidden: [T, H], the pass's output.
        logits_of: [n, H] -> float32 [n, V]; called with a few rows at a time, so that the memory
            needed does not grow with the prompt.
        likeliest: the device's op.
        spans: what to score.
        vocab_size: V.

    Raises:
        InternalError: logits are not finite.
    """
    block_len = max(1, _BLOCK_VALUES // vocab_size)
    return [
        PromptScores(
            request_id=span.request_id,
            first_position=span.first_position,
            tokens=list(_score(hidden, logits_of, likeliest, span, block_len)),
        )
        for span in spans
    ]


def _score(
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    likeliest: LikeliestOp,
    span: ScoreSpan,
    block_len: int,
) -> Iterator[ScoredToken]:
    for begin in range(0, len(span.target_ids), block_len):
        target_ids = span.target_ids[begin : begin + block_len]
        first_row = span.row + begin
        logits = logits_of(hidden[first_row : first_row + len(target_ids)])
        log_sums = torch.logsumexp(logits, dim=-1)
        if not bool(torch.isfinite(log_sums).all()):
            raise InternalError(f"logits of the prompt of request {span.request_id} are not finite")
        targets = torch.tensor(target_ids, device=logits.device)[:, None]
        logprobs = (logits.gather(1, targets)[:, 0] - log_sums).tolist()
        tops: list[list[tuple[int, float]]] = [[] for _ in target_ids]
        if span.num_top:
            values, ids = likeliest(logits, min(span.num_top, logits.shape[1]))
            rows = zip(ids.tolist(), (values - log_sums[:, None]).tolist(), strict=True)
            tops = [list(zip(*row, strict=True)) for row in rows]
        for token_id, logprob, top in zip(target_ids, logprobs, tops, strict=True):
            yield ScoredToken(token_id=token_id, logprob=logprob, top=top)
