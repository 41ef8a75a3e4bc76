"""One token of a row of logits: greedy, or drawn from what temperature and filters leave.

Temperature, then ``top_k``, ``top_p`` and ``min_p``, each on what the one before has left,
renormalised. A draw walks the kept tokens in id order, so that no sort decides which token a number
falls on. In float64. Sources: Fan et al. 2018, "Hierarchical Neural Story Generation" (top-k);
Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration" (top-p); Nguyen et al. 2024,
"Turning Up the Heat: Min-p Sampling".
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.reference.philox import token_uniform

__all__ = ["kept_weights", "sample", "sample_row"]


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    output_idx: Tensor,
) -> Tensor:
    """:func:`sample_row` of each row: logits [N, V] and [N] each -> int64 [N].

    ``seed`` is int64 with the bits of the unsigned seed.
    """
    columns = zip(
        *(x.tolist() for x in (temperature, top_k, top_p, min_p, seed, output_idx)), strict=True
    )
    rows = [
        sample_row(row, heat, k, p, least, bits % (1 << 64), idx)
        for row, (heat, k, p, least, bits, idx) in zip(logits, columns, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=logits.device)


def sample_row(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    output_idx: int,
) -> int:
    """The token drawn from logits [V]; temperature 0 is greedy, the lowest id of equal ones.

    Returns:
        An id; -1 where the logits have a NaN or +inf, or are all -inf.
    """
    wide = logits.double()
    if not bool(wide.logsumexp(0).isfinite()):
        return -1
    if temperature == 0:
        return int((wide == wide.max()).nonzero()[0])
    weights = kept_weights(logits, temperature, top_k, top_p, min_p)
    cumulative = weights.cumsum(0)
    target = token_uniform(seed, output_idx) * float(cumulative[-1])
    return int(torch.searchsorted(cumulative, target, right=True))


def kept_weights(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Logits [V] -> float64 [V]: weights relative to the heaviest token's; 0: filtered out.

    Args:
        temperature: above 0.
        top_k: 0 keeps all; of equal logits lower ids stay.
        top_p: 1 keeps all; likewise.
        min_p: 0 keeps all.
    """
    wide = logits.double()
    weights = torch.exp((wide - wide.max()) / temperature)
    order = torch.argsort(wide, descending=True, stable=True)
    if 0 < top_k < len(weights):
        weights[order[top_k:]] = 0
    if top_p < 1:
        cumulative = weights[order].cumsum(0)
        num_kept = int((cumulative < top_p * cumulative[-1]).sum()) + 1
        weights[order[num_kept:]] = 0
    return weights.masked_fill(weights < min_p, 0.0)
