"""Which experts a token goes to: softmax and top-k, or sigmoid, bias and the best groups.

Specification: ``kernels/reference/routing``; in float32. Of equal scores the lower expert comes
first. A token whose logits are NaN gets experts that exist, and weights of NaN, which the rank
finds in the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.attention_tiles import next_power_of_2

__all__ = ["grouped_routing", "softmax_routing"]

#: Tokens of one program.
_BLOCK_T = 8


def softmax_routing(logits: Tensor, num_chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The most likely experts, with their probabilities among all of them.

    Args:
        logits: [T, E] in any float dtype.
        num_chosen: K, experts of a token.
        renormalise: whether the weights of a token's experts are made to sum to 1.

    Returns:
        weights float32 [T, K], and ids int64 [T, K], the highest first.
    """
    num_tokens, num_experts = logits.shape
    assert logits.stride(1) == 1 and 0 < num_chosen <= num_experts
    weights, ids = _results(logits, num_chosen)
    if num_tokens:
        _softmax_kernel[(-(-num_tokens // _BLOCK_T),)](
            logits,
            weights,
            ids,
            num_tokens,
            logits.stride(0),
            NUM_EXPERTS=num_experts,
            NUM_CHOSEN=num_chosen,
            RENORMALISE=renormalise,
            BLOCK_T=_BLOCK_T,
            BLOCK_E=next_power_of_2(num_experts),
            BLOCK_K=next_power_of_2(num_chosen),
            num_warps=4,
        )
    return weights, ids


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

    Args:
        logits: [T, E] in any float dtype, groups side by side.
        bias: float32 [E]; it only chooses.
        num_chosen: K, experts of a token.
        num_groups: divides E; a group has two experts or more.
        num_chosen_groups: of a token; they have K experts or more.
        renormalise: whether the weights of a token's experts are made to sum to 1.
        scale: what they are multiplied by in the end.

    Returns:
        weights float32 [T, K], and ids int64 [T, K].
    """
    num_tokens, num_experts = logits.shape
    group_size = num_experts // num_groups
    assert logits.stride(1) == bias.stride(0) == 1 and num_experts % num_groups == 0
    assert group_size >= 2 and num_chosen <= num_chosen_groups * group_size
    weights, ids = _results(logits, num_chosen)
    if num_tokens:
        _grouped_kernel[(-(-num_tokens // _BLOCK_T),)](
            logits,
            bias,
            weights,
            ids,
            num_tokens,
            scale,
            logits.stride(0),
            GROUP_SIZE=group_size,
            NUM_GROUPS=num_groups,
            NUM_CHOSEN_GROUPS=num_chosen_groups,
            NUM_CHOSEN=num_chosen,
            RENORMALISE=renormalise,
            BLOCK_T=_BLOCK_T,
            BLOCK_G=next_power_of_2(num_groups),
            BLOCK_S=next_power_of_2(group_size),
            BLOCK_K=next_power_of_2(num_chosen),
            num_warps=4,
        )
    return weights, ids


def _results(logits: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
    shape = (len(logits), num_chosen)
    return (
        torch.empty(shape, dtype=torch.float32, device=logits.device),
        torch.empty(shape, dtype=torch.int64, device=logits.device),
    )


@triton.jit
def _softmax_kernel(
    logits_ptr,
    weights_ptr,
    ids_ptr,
    num_tokens,
    stride_t,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    is_token = token < num_tokens
    expert, k = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    free = is_token & (expert < NUM_EXPERTS)
    logits = tl.load(logits_ptr + token * stride_t + expert, mask=free, other=float("-inf"))
    logits = logits.to(tl.float32)
    odds = tl.exp(logits - tl.max(logits, 1)[:, None])
    odds = odds / tl.sum(odds, 1)[:, None]
    weights = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    ids = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for i in range(NUM_CHOSEN):
        # The lowest free place of the largest; the last one where nothing compares (NaN).
        left = tl.where(free, logits, float("-inf"))
        is_best = free & (left == tl.max(left, 1)[:, None])
        best = tl.min(tl.where(is_best, expert, NUM_EXPERTS - 1), 1)[:, None]
        weight = tl.sum(tl.where(expert == best, odds, 0.0), 1)[:, None]
        weights, ids = tl.where(k == i, weight, weights), tl.where(k == i, best, ids)
        free &= expert != best
    if RENORMALISE:
        weights = weights / tl.sum(weights, 1)[:, None]
    is_out = is_token & (k < NUM_CHOSEN)
    tl.store(weights_ptr + token * NUM_CHOSEN + k, weights, mask=is_out)
    tl.store(ids_ptr + token * NUM_CHOSEN + k, ids.to(tl.int64), mask=is_out)


@triton.jit
def _grouped_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    num_tokens,
    scale,
    stride_t,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    NUM_EXPERTS: tl.constexpr = NUM_GROUPS * GROUP_SIZE
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    is_token = token < num_tokens
    # Tokens x groups x members of a group, which need not be powers of 2.
    group, member = tl.arange(0, BLOCK_G)[None, :, None], tl.arange(0, BLOCK_S)[None, None, :]
    is_expert = (group < NUM_GROUPS) & (member < GROUP_SIZE)
    expert = group * GROUP_SIZE + member
    is_score = is_token[:, None, None] & is_expert
    rows = (token * stride_t)[:, None, None]
    logits = tl.load(logits_ptr + rows + expert, mask=is_score, other=0.0)
    scores = tl.sigmoid(logits.to(tl.float32))
    biased = scores + tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    biased = tl.where(is_score, biased, float("-inf"))

    # A group's two best: the largest, and the largest of what is left without its first place.
    best = tl.max(biased, 2)
    is_best = biased == tl.expand_dims(best, 2)
    first = tl.expand_dims(tl.min(tl.where(is_best, member, BLOCK_S), 2), 2)
    pairs = best + tl.max(tl.where(member == first, float("-inf"), biased), 2)
    g = tl.arange(0, BLOCK_G)[None, :]
    groups_left = is_token[:, None] & (g < NUM_GROUPS)
    for _ in range(NUM_CHOSEN_GROUPS):
        left = tl.where(groups_left, pairs, float("-inf"))
        is_best_pair = groups_left & (left == tl.max(left, 1)[:, None])
        groups_left &= g != tl.min(tl.where(is_best_pair, g, NUM_GROUPS - 1), 1)[:, None]
    # Not a low score but out of the choice: through the bias all of the best groups may be low.
    is_out_of_it = tl.expand_dims(groups_left.to(tl.int32), 2)

    FLAT: tl.constexpr = BLOCK_G * BLOCK_S
    free = tl.reshape((is_score & (is_out_of_it == 0)).to(tl.int32), (BLOCK_T, FLAT)) != 0
    biased = tl.reshape(biased, (BLOCK_T, FLAT))
    scores = tl.reshape(scores, (BLOCK_T, FLAT))
    place = tl.arange(0, FLAT)[None, :]
    expert = place // BLOCK_S * GROUP_SIZE + place % BLOCK_S
    k = tl.arange(0, BLOCK_K)[None, :]
    weights = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    ids = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for i in range(NUM_CHOSEN):
        left = tl.where(free, biased, float("-inf"))
        is_next = free & (left == tl.max(left, 1)[:, None])
        chosen = tl.min(tl.where(is_next, expert, NUM_EXPERTS - 1), 1)[:, None]
        weight = tl.sum(
            tl.where((expert == chosen) & (place % BLOCK_S < GROUP_SIZE), scores, 0.0), 1
        )
        weights = tl.where(k == i, weight[:, None], weights)
        ids = tl.where(k == i, chosen, ids)
        free &= expert != chosen
    if RENORMALISE:
        weights = weights / tl.sum(weights, 1)[:, None]
    to, is_out = token[:, None] * NUM_CHOSEN + k, is_token[:, None] & (k < NUM_CHOSEN)
    tl.store(weights_ptr + to, weights * scale, mask=is_out)
    tl.store(ids_ptr + to, ids.to(tl.int64), mask=is_out)
