"""From rows of logits to one token a row, on the device.

Specification: ``kernels/reference/sampling``. A program has a row. What top-k and top-p keep is the
tokens above a logit, and the first few of those equal to it: that logit is searched by its bits
with passes that count tokens, or add up their weights, which needs no sort and gives ties to the
lower id. Weights are float64, so that a draw falls on the token that the CPU's falls on.
A row is read some 30 times where both filters are on, from the L2 cache; 3 times without.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.philox import token_uniform

__all__ = ["sample"]

_BLOCK = 1024


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    output_idx: Tensor,
    num_ids: int | None = None,
) -> Tensor:
    """logits float32 [N, V] and [N] each -> int64 [N]: token ids. A captured graph reads all anew.

    A row that has a NaN or +inf, or nothing but -inf, gives -1: no token may look as if it were
    one.

    Args:
        logits: after the requests' rules; rows of any distance, elements side by side.
        temperature: float64; 0 is greedy.
        top_k: int32; 0 keeps all.
        top_p: float64; 1 keeps all.
        min_p: float64; 0 keeps all.
        seed: int64 whose bits are those of the unsigned seed.
        output_idx: int64: which output token of its request a row gives.
        num_ids: ids that the tokenizer has, where V is padded; the others are never drawn.
    """
    num_rows, width = logits.shape
    num_ids = width if num_ids is None else num_ids
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and 0 < num_ids <= width
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _kernel[(num_rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            output_idx,
            tokens,
            num_ids,
            logits.stride(0),
            BLOCK=_BLOCK,
            num_warps=16,
        )
    return tokens


@triton.jit
def _block_of(row_ptr, first, num_ids, BLOCK: tl.constexpr):
    """Logits of ids first .. first + BLOCK, -inf past the last, and int32 keys in their order."""
    token = first + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + token, mask=token < num_ids, other=float("-inf"))
    # Equal numbers have equal keys: there is one zero.
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    return logits, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _best(row_ptr, num_ids, BLOCK: tl.constexpr):
    """The largest logit, the lowest id that has it (-1: there is none), and whether a NaN or +inf
    is among them."""
    largest = tl.full((), float("-inf"), tl.float32)
    best, broken = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    for first in range(0, num_ids, BLOCK):
        logits, _ = _block_of(row_ptr, first, num_ids, BLOCK)
        bad = (logits != logits) | (logits == float("inf"))
        broken = tl.maximum(broken, tl.max(bad.to(tl.int32), 0))
        logits = tl.where(bad, float("-inf"), logits)
        top = tl.max(logits, 0)
        token = first + tl.arange(0, BLOCK)
        place = tl.min(tl.where(logits == top, token, num_ids), 0)
        best = tl.where((top > largest) | (first == 0), place, best)
        largest = tl.maximum(largest, top)
    return largest, tl.where(largest == float("-inf"), -1, best), broken


@triton.jit
def _weights(logits, largest, temperature):
    """float64 weights relative to the heaviest token's."""
    return tl.exp((logits.to(tl.float64) - largest.to(tl.float64)) / temperature)


@triton.jit
def _above(row_ptr, num_ids, key, largest, temperature, BLOCK: tl.constexpr):
    """How many tokens have keys above ``key``, and the sum of their weights."""
    counts, masses = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.float64)
    for first in range(0, num_ids, BLOCK):
        logits, keys = _block_of(row_ptr, first, num_ids, BLOCK)
        is_in = (keys > key) & (first + tl.arange(0, BLOCK) < num_ids)
        counts += is_in.to(tl.int32)
        masses += tl.where(is_in, _weights(logits, largest, temperature), 0.0)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _search(
    row_ptr, num_ids, wanted, largest, temperature, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key from which on tokens are at least ``wanted``, in number or in weight.

    Three bits a pass, from the highest: eight bounds are tried together.
    """
    key = tl.full((), -(2**31), tl.int64)
    for i in range(11):
        step = tl.full((), 1, tl.int64) << (30 - 3 * i)
        bounds = key + tl.arange(0, 8).to(tl.int64) * step
        # No number has the highest key, so a bound past it finds nothing either.
        bounds = tl.minimum(bounds, 2**31 - 1).to(tl.int32)
        found = tl.zeros((8, BLOCK), tl.float64 if BY_MASS else tl.int32)
        for first in range(0, num_ids, BLOCK):
            logits, keys = _block_of(row_ptr, first, num_ids, BLOCK)
            is_token = first + tl.arange(0, BLOCK) < num_ids
            is_in = (keys[None, :] >= bounds[:, None]) & is_token[None, :]
            if BY_MASS:
                weights = _weights(logits, largest, temperature)
                found += tl.where(is_in, weights[None, :], 0.0)
            else:
                found += is_in.to(tl.int32)
        reached = (tl.sum(found, 1) >= wanted) & (tl.arange(0, 8) > 0)
        key += tl.sum(reached.to(tl.int64), 0) * step
    return key.to(tl.int32)


@triton.jit
def _filter(row_ptr, num_ids, largest, temperature, top_k, top_p, BLOCK: tl.constexpr):
    """What top-k, then top-p, keep: keys above the first result, and so many equal to it, of the
    lowest ids.
    """
    key, num_equal = tl.full((), -(2**31), tl.int32), num_ids
    if (top_k > 0) & (top_k < num_ids):
        key = _search(row_ptr, num_ids, top_k, largest, temperature, False, BLOCK)
        above, _ = _above(row_ptr, num_ids, key, largest, temperature, BLOCK)
        num_equal = top_k - above
    if top_p < 1:
        _, mass = _above(row_ptr, num_ids, key, largest, temperature, BLOCK)
        # No number has the lowest key: without top-k nothing is equal to it.
        is_cut = key > -(2**31)
        weight = tl.where(is_cut, _weight_of(key, largest, temperature), 0.0)
        wanted = top_p * (mass + weight * num_equal)
        if mass >= wanted:
            key = _search(row_ptr, num_ids, wanted, largest, temperature, True, BLOCK)
            _, mass = _above(row_ptr, num_ids, key, largest, temperature, BLOCK)
            weight = _weight_of(key, largest, temperature)
            num_equal = num_ids
        missing = tl.ceil((wanted - mass) / tl.maximum(weight, 1e-300))
        num_equal = tl.minimum(tl.maximum(missing, 1.0), num_equal).to(tl.int32)
    return key, num_equal


@triton.jit
def _weight_of(key, largest, temperature):
    """The weight of the tokens that have this key."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return _weights(bits.to(tl.float32, bitcast=True), largest, temperature)


@triton.jit
def _kept(
    row_ptr,
    first,
    num_ids,
    key,
    num_equal,
    seen_equal,
    largest,
    temperature,
    min_p,
    BLOCK: tl.constexpr,
):
    """A block's weights, 0 where they are filtered out, and how many equals end with it."""
    logits, keys = _block_of(row_ptr, first, num_ids, BLOCK)
    is_token = first + tl.arange(0, BLOCK) < num_ids
    is_equal = (is_token & (keys == key)).to(tl.int32)
    rank = seen_equal + tl.cumsum(is_equal, 0)
    kept = is_token & ((keys > key) | ((is_equal != 0) & (rank <= num_equal)))
    weights = _weights(logits, largest, temperature)
    return tl.where(kept & (weights >= min_p), weights, 0.0), seen_equal + tl.sum(is_equal, 0)


@triton.jit
def _draw(
    row_ptr, num_ids, key, num_equal, largest, temperature, min_p, uniform, BLOCK: tl.constexpr
):
    """The token on which ``uniform`` falls among the kept ones in id order."""
    total, seen = tl.full((), 0.0, tl.float64), tl.full((), 0, tl.int32)
    for first in range(0, num_ids, BLOCK):
        weights, seen = _kept(
            row_ptr, first, num_ids, key, num_equal, seen, largest, temperature, min_p, BLOCK
        )
        total += tl.sum(weights, 0)
    target = uniform * total
    before, seen = tl.full((), 0.0, tl.float64), tl.full((), 0, tl.int32)
    token, last = tl.full((), -1, tl.int32), tl.full((), -1, tl.int32)
    first = 0
    while (token < 0) & (first < num_ids):
        weights, seen = _kept(
            row_ptr, first, num_ids, key, num_equal, seen, largest, temperature, min_p, BLOCK
        )
        place = first + tl.arange(0, BLOCK)
        is_past = (before + tl.cumsum(weights, 0) > target) & (weights > 0)
        found = tl.min(tl.where(is_past, place, num_ids), 0)
        token = tl.where(found < num_ids, found, -1)
        last = tl.maximum(last, tl.max(tl.where(weights > 0, place, -1), 0))
        before += tl.sum(weights, 0)
        first += BLOCK
    # Sums in another order may end below the target by a rounding.
    return tl.where(token < 0, last, token)


@triton.jit
def _kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    output_idx_ptr,
    tokens_ptr,
    num_ids,
    stride_l,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_l
    largest, token, broken = _best(row_ptr, num_ids, BLOCK)
    if broken != 0:
        token = tl.full((), -1, tl.int32)
    temperature = tl.load(temperature_ptr + row)
    if (token >= 0) & (temperature > 0):
        key, num_equal = _filter(
            row_ptr,
            num_ids,
            largest,
            temperature,
            tl.load(top_k_ptr + row),
            tl.load(top_p_ptr + row),
            BLOCK,
        )
        uniform = token_uniform(tl.load(seed_ptr + row), tl.load(output_idx_ptr + row))
        min_p = tl.load(min_p_ptr + row)
        token = _draw(row_ptr, num_ids, key, num_equal, largest, temperature, min_p, uniform, BLOCK)
    tl.store(tokens_ptr + row, token.to(tl.int64))
