"""From logits to one token a row. The leader rank's main thread.

The order of what happens to a row: the request's rules (``pdx.runner.logit_rules``: bias,
penalties, ``min_tokens``), then the highest logit where the temperature is 0; else temperature,
``top_k``, ``top_p``, ``min_p``, each on what the one before has left, renormalised, and a draw.
Log-probabilities are those of the raw logits, before all of it.

A draw walks the kept tokens in id order, so no sort decides which token a number falls on, and a
uniform number per (seed, output index) makes it repeatable on any decoder, in any company.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdx.errors import InternalError
from pdx.kernels.reference.philox import token_uniform
from pdx.request.batch import SampledToken
from pdx.request.request import SamplingParams
from pdx.runner.likeliest import likeliest_ids, top_logprobs
from pdx.runner.requests import Draw

__all__ = ["sample", "sample_row"]


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[SampledToken]:
    """One token per draw.

    Args:
        logits: float32 [N, V], a row per draw in order.
        draws: how each row is sampled.

    Returns:
        Tokens with the log-probabilities that the raw logits give them.

    Raises:
        InternalError: a row is not finite; it must never become a plausible token.
    """
    log_sums = torch.logsumexp(logits, dim=-1)
    if not bool(torch.isfinite(log_sums).all()):
        broken = [d.request_id for d, ok in zip(draws, log_sums.isfinite(), strict=True) if not ok]
        raise InternalError(f"logits of requests {broken} are not finite")
    # numpy, because it promises the first of equal maxima; torch promises none in particular.
    token_ids = logits.numpy().argmax(axis=-1)
    for idx, draw in enumerate(draws):
        if draw.rules is not None or draw.sampling.temperature != 0:
            row = logits[idx]
            if draw.rules is not None:
                row = draw.rules.apply(row, draw.output_ids)
            token_ids[idx] = sample_row(row, draw.sampling, draw.output_idx)
    chosen = logits[torch.arange(len(draws)), torch.from_numpy(token_ids)]
    tops = _tops(logits, log_sums, draws)
    return [
        SampledToken(request_id=draw.request_id, token_id=token_id, logprob=logprob, top=top)
        for draw, token_id, logprob, top in zip(
            draws, token_ids.tolist(), (chosen - log_sums).tolist(), tops, strict=True
        )
    ]


def sample_row(row: Tensor, sampling: SamplingParams, output_idx: int) -> int:
    """The token id drawn from float32 logits [V] to which the request's rules were applied."""
    if sampling.temperature == 0:
        return int(row.numpy().argmax())
    kept = None  # all ids
    if 0 < sampling.top_k < len(row):
        kept = np.sort(likeliest_ids(row[None], sampling.top_k)[0])
        row = row[torch.from_numpy(kept)]
    # float64: the sum of 100k float32 weights would be off by more than the smallest of them.
    wide = row.to(torch.float64)
    weights = torch.exp((wide - wide.max()) / sampling.temperature)
    # The heaviest weight is 1, and neither of the other filters drops it.
    too_light = weights < sampling.min_p
    if sampling.top_p < 1:
        weights = _nucleus(weights, sampling.top_p)
    if sampling.min_p > 0:
        weights.masked_fill_(too_light, 0.0)
    cumulative = torch.cumsum(weights, dim=0)
    target = token_uniform(sampling.seed, output_idx) * float(cumulative[-1])
    # The first whose cumulative weight is above the target: never one of weight zero.
    place = int(torch.searchsorted(cumulative, target, right=True))
    return place if kept is None else int(kept[place])


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


def _tops(logits: Tensor, log_sums: Tensor, draws: Sequence[Draw]) -> list[list[tuple[int, float]]]:
    """The likeliest ids of each row, as many as its request asks for, with log-probabilities."""
    tops: list[list[tuple[int, float]]] = [[] for _ in draws]
    asking = [idx for idx, draw in enumerate(draws) if draw.sampling.logprobs]
    if asking:
        wanted = [draws[idx].sampling.logprobs or 0 for idx in asking]
        found = top_logprobs(logits[asking], log_sums[asking], max(wanted))
        for idx, num, top in zip(asking, wanted, found, strict=True):
            tops[idx] = top[:num]
    return tops
