"""Which experts a token goes to, and how much each one's output weighs.

In float32: near ties are common, and another expert is another text. Sources: Shazeer et al. 2017,
"Outrageously Large Neural Networks"; Qwen Team 2025, "Qwen3 Technical Report".
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.reference.accumulate import widen

__all__ = ["softmax_routing"]


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
