"""Which experts a token goes to, and how much each one's output weighs.

In float32: near ties are common, and another expert is another text. Sources: Shazeer et al. 2017,
"Outrageously Large Neural Networks"; Qwen Team 2025, "Qwen3 Technical Report"; DeepSeek-AI 2024,
"DeepSeek-V3 Technical Report", section 2.1.2, and its published code for the groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.reference.accumulate import widen

__all__ = ["grouped_routing", "softmax_routing"]


def softmax_routing(logits: Tensor, num_chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The most likely experts, with their probabilities among all of them.

    Args:
        logits: [T, E].
        num_chosen: K, experts of a token.
        renormalise: whether the weights of a token's experts are made to sum to 1.

    Returns:
        weights [T, K], float32 or wider, and ids int64 [T, K].
    """
    weights, ids = torch.softmax(widen(logits), dim=-1).topk(num_chosen, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), ids


def grouped_routing(
    logits: Tensor,
    bias: Tensor,
    num_chosen: int,
    num_groups: int,
    num_chosen_groups: int,
    renormalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The highest sigmoid + bias within the groups whose two best experts are highest together.

    The bias, which balances the experts' load, only chooses: weights are the sigmoids alone.

    Args:
        logits: float32 [T, E], groups side by side.
        bias: float32 [E].
        num_chosen: K, experts of a token.
        num_groups: divides E.
        num_chosen_groups: of a token.
        renormalise: whether the weights of a token's experts are made to sum to 1.
        scale: what they are multiplied by in the end.

    Returns:
        weights [T, K], float32 or wider, and ids int64 [T, K].
    """
    scores = torch.sigmoid(widen(logits))
    by_group = (scores + widen(bias)).view(len(scores), num_groups, scores.shape[1] // num_groups)
    best_groups = by_group.topk(2, dim=-1).values.sum(-1).topk(num_chosen_groups, dim=-1).indices
    left_out = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best_groups, False)
    # Not 0: through the bias an expert of the best groups may be below it.
    biased = by_group.masked_fill(left_out[..., None], float("-inf")).flatten(1)
    ids = biased.topk(num_chosen, dim=-1).indices
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, ids
