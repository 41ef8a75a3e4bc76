"""Copy a context between paged memories of other heads, or of other pages, on one device.

Re-head: a range of heads goes to another place among the destination's heads. Re-cut: the page
sizes differ. Both at once is the same loop. Also how requests that share a prefix part ways: each
gets its own copy of the last, partly filled page. Specification: ``kernels/reference/page_copy``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdx.kernels.attention_tiles import next_power_of_2

__all__ = ["page_copy"]

#: Tokens of one program.
_BLOCK_N = 32


def page_copy(
    source: Tensor,
    source_pages: Tensor,
    target: Tensor,
    target_pages: Tensor,
    num_tokens: int,
    *,
    source_head: int = 0,
    target_head: int = 0,
    num_heads: int | None = None,
) -> None:
    """A context's first ``num_tokens``: source [P, H, 2, S, D] to target [P', H', 2, S', D].

    Args:
        source: one layer of a memory.
        source_pages: int32, the context's pages there, in order.
        target: one layer of another memory (or of the same, in other pages), in the same dtype.
        target_pages: int32, the context's pages there, in order.
        num_tokens: all else in ``target`` stays.
        source_head: the first head to copy.
        target_head: where it goes.
        num_heads: how many; all from ``source_head`` on where it is None.
    """
    (_, source_heads, _, source_page, head_dim), target_page = source.shape, target.shape[3]
    num_heads = source_heads - source_head if num_heads is None else num_heads
    assert source_head + num_heads <= source_heads and target_head + num_heads <= target.shape[1]
    assert source.dtype == target.dtype and target.shape[4] == head_dim
    assert source.stride(4) == target.stride(4) == 1
    if num_tokens and num_heads:
        _kernel[(triton.cdiv(num_tokens, _BLOCK_N), num_heads, 2)](
            source,
            source_pages,
            target,
            target_pages,
            num_tokens,
            source_head,
            target_head,
            *source.stride()[:4],
            *target.stride()[:4],
            SOURCE_PAGE=source_page,
            TARGET_PAGE=target_page,
            HEAD_DIM=head_dim,
            BLOCK_N=_BLOCK_N,
            BLOCK_D=next_power_of_2(head_dim),
            num_warps=4,
        )


@triton.jit
def _kernel(
    source_ptr,
    source_pages_ptr,
    target_ptr,
    target_pages_ptr,
    num_tokens,
    source_head,
    target_head,
    stride_sp,
    stride_sh,
    stride_sv,
    stride_st,
    stride_tp,
    stride_th,
    stride_tv,
    stride_tt,
    SOURCE_PAGE: tl.constexpr,
    TARGET_PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head, half = tl.program_id(1), tl.program_id(2)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    is_n = n < num_tokens
    source_page = tl.load(source_pages_ptr + n // SOURCE_PAGE, mask=is_n, other=0).to(tl.int64)
    target_page = tl.load(target_pages_ptr + n // TARGET_PAGE, mask=is_n, other=0).to(tl.int64)
    source = source_page * stride_sp + (n % SOURCE_PAGE) * stride_st
    target = target_page * stride_tp + (n % TARGET_PAGE) * stride_tt
    source_ptr += (source_head + head) * stride_sh + half * stride_sv
    target_ptr += (target_head + head) * stride_th + half * stride_tv
    mask = is_n[:, None] & (d < HEAD_DIM)[None, :]
    values = tl.load(source_ptr + source[:, None] + d[None, :], mask=mask)
    tl.store(target_ptr + target[:, None] + d[None, :], values, mask=mask)
