"""The progress word of a GPU rank: stored by a kernel of the stream, so that graphs stay whole.

A launch of its own, behind the append: the stream's order puts everything the layer stored before
it, and the release makes that visible to the CPU and the NIC before the word. What the word says
stands in ``pdx/kv/progress``: absolute values, never increments, which a lost reset cannot make lie
and which need no atomics across PCIe.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["publish"]


def publish(word: Tensor, base: Tensor, step: int) -> None:
    """Store ``base + step`` with release order for the whole system.

    Args:
        word: int64 [1], in memory that the fabric workers read.
        base: int64 [1], on the device: a captured graph's arguments are frozen, so the value
            that changes from pass to pass is read from memory.
        step: of the pass, from 1.
    """
    _kernel[(1,)](word, base, step, num_warps=1)


@triton.jit(do_not_specialize=["step"])
def _kernel(word_ptr, pass_base_ptr, step):
    value = tl.load(pass_base_ptr) + step
    # Triton before 3.9 puts none before a release, and one thread's release would not publish what
    # the block's other threads stored. Here they store nothing; it is the form that the gate asks.
    tl.debug_barrier()
    tl.atomic_xchg(word_ptr, value, sem="release", scope="sys")
