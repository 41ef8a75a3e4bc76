"""Philox4x32-10 inside kernels: the words of ``kernels/reference/philox``, to the bit."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["token_uniform"]


@triton.jit
def token_uniform(seed, index):
    """float64 in (0, 1) that a token draws.

    Args:
        seed: int64, its bits those of the unsigned seed.
        index: int64, not negative: the output token's.
    """
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    c0, c1 = index & 0xFFFFFFFF, index >> 32
    c2, c3 = index * 0, index * 0
    for _ in tl.static_range(10):
        # A product of 32-bit words fits 64 bits, but not 63: its high half is made of halves.
        low0, low2 = c0 & 0xFFFF, c2 & 0xFFFF
        mid0 = (c0 >> 16) * 0xD2511F53 + ((low0 * 0xD2511F53) >> 16)
        mid2 = (c2 >> 16) * 0xCD9E8D57 + ((low2 * 0xCD9E8D57) >> 16)
        high0, high2 = mid0 >> 16, mid2 >> 16
        product0 = ((mid0 & 0xFFFF) << 16) | ((low0 * 0xD2511F53) & 0xFFFF)
        product2 = ((mid2 & 0xFFFF) << 16) | ((low2 * 0xCD9E8D57) & 0xFFFF)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, product2, high0 ^ c3 ^ k1, product0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return (c0.to(tl.float64) + 0.5) / 4294967296.0
