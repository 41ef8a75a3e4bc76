"""From logits to one token a row: greedy, or temperature and top-p. The leader rank's main thread.

A draw walks the kept tokens in id order, so no sort decides which token a number falls on, and a
uniform number per (seed, output index) makes it repeatable on any decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdx.errors import InternalError
from pdx.kernels.reference.philox import token_uniform
from pdx.request.batch import SampledToken
from pdx.request.request import SamplingParams
from pdx.runner.requests import Draw

__all__ = ["sample", "sample_row"]


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[SampledToken]:
    """One token per draw.

    Args:
        logits: float32 [N, V], a row per draw in order.
        draws: how each row is sampled.

    Returns:
        Tokens with the log-probability that the raw logits give them.

    Raises:
        InternalError: a row is not finite; it must never become a plausible token.
    """
    log_sums = torch.logsumexp(logits, dim=-1)
    if not bool(torch.isfinite(log_sums).all()):
        broken = [d.request_id for d, ok in zip(draws, log_sums.isfinite(), strict=True) if not ok]
        raise InternalError(f"logits of requests {broken} are not finite")
    tokens: list[SampledToken] = []
    for row, log_sum, draw in zip(logits, log_sums, draws, strict=True):
        token_id = sample_row(row, draw.sampling, draw.output_idx)
        logprob = float(row[token_id] - log_sum)
        tokens.append(SampledToken(request_id=draw.request_id, token_id=token_id, logprob=logprob))
    return tokens


def sample_row(row: Tensor, sampling: SamplingParams, output_idx: int) -> int:
    """The token id drawn from float32 logits [V]."""
    if sampling.temperature == 0:
        # numpy, because it promises the first of equal maxima; torch promises none in particular.
        return int(row.numpy().argmax())
    # float64: the sum of 100k float32 weights would be off by more than the smallest of them.
    wide = row.to(torch.float64)
    weights = torch.exp((wide - wide.max()) / sampling.temperature)
    if sampling.top_p < 1:
        weights = _nucleus(weights, sampling.top_p)
    cumulative = torch.cumsum(weights, dim=0)
    target = token_uniform(sampling.seed, output_idx) * float(cumulative[-1])
    # The first id whose cumulative weight is above the target: never one of weight zero.
    return int(torch.searchsorted(cumulative, target, right=True))


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Zero all but the fewest heaviest tokens that hold ``top_p``; of equal ones lower ids stay."""
    probs = weights / weights.sum()
    # Tokens below (1 - top_p) / V weigh less than 1 - top_p together, so none of them can be
    # needed. Leaving them out makes the sort short; half of the bound leaves room for rounding.
    candidates = (probs >= (1 - top_p) / (2 * len(probs))).nonzero().flatten()
    order = candidates[torch.argsort(probs[candidates], descending=True, stable=True)]
    cumulative = torch.cumsum(probs[order], dim=0)
    num_kept = int((cumulative < top_p).sum()) + 1
    kept = torch.zeros_like(weights)
    kept[order[:num_kept]] = weights[order[:num_kept]]
    return kept
