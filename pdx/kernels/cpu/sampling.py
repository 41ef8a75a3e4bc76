"""One token of a row of logits on a CPU, with as little sorting as the filters allow.

Specification: ``kernels/reference/sampling``, whose tokens these are. Greedy rows are one pass over
the logits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pdx.kernels.cpu.likeliest import likeliest
from pdx.kernels.reference.philox import token_uniform

__all__ = ["sample", "sample_row"]


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    output_idx: Tensor,
) -> Tensor:
    """logits float32 [N, V] and [N] each -> int64 [N]; -1 where a row has a NaN or +inf, or nothing
    but -inf.
    """
    # numpy, because it promises the first of equal maxima, and a NaN where there is one; torch
    # promises none in particular.
    rows = logits.numpy()
    token_ids = rows.argmax(axis=-1) if rows.size else np.empty(len(rows), np.int64)
    token_ids[~np.isfinite(rows[np.arange(len(rows)), token_ids])] = -1
    columns = (temperature, top_k, top_p, min_p, seed, output_idx)
    for idx in np.flatnonzero((token_ids >= 0) & (temperature.numpy() != 0)).tolist():
        heat, k, p, least, bits, place = (column[idx].item() for column in columns)
        token_ids[idx] = sample_row(
            logits[idx], heat, int(k), p, least, int(bits) % (1 << 64), int(place)
        )
    return torch.from_numpy(token_ids)


def sample_row(
    row: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    output_idx: int,
) -> int:
    """The token id drawn from finite logits float32 [V]. Arguments are the reference's."""
    if temperature == 0:
        return int(row.numpy().argmax())
    kept = None  # all ids
    if 0 < top_k < len(row):
        _, ids = likeliest(row[None], top_k)
        kept = ids[0].sort().values
        row = row[kept]
    # float64: the sum of 100k float32 weights would be off by more than the smallest of them.
    wide = row.to(torch.float64)
    weights = torch.exp((wide - wide.max()) / temperature)
    # The heaviest weight is 1, and neither of the other filters drops it.
    too_light = weights < min_p
    if top_p < 1:
        weights = _nucleus(weights, top_p)
    if min_p > 0:
        weights.masked_fill_(too_light, 0.0)
    cumulative = torch.cumsum(weights, dim=0)
    target = token_uniform(seed, output_idx) * float(cumulative[-1])
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
