"""Copy a context between paged memories: target[page'(t), h', :, offset'(t)] = source[...]."""

from __future__ import annotations

from torch import Tensor

__all__ = ["page_copy"]


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
    """source [P, H, 2, S, D] to target [P', H', 2, S', D]; ``num_heads`` None: all of them."""
    num_heads = source.shape[1] - source_head if num_heads is None else num_heads
    for token in range(num_tokens):
        from_page, from_place = divmod(token, source.shape[3])
        to_page, to_place = divmod(token, target.shape[3])
        taken = source[source_pages[from_page], source_head:, :, from_place][:num_heads]
        heads = slice(target_head, target_head + num_heads)
        target[target_pages[to_page], heads, :, to_place] = taken
