"""A part of a prompt that one pass computes, as scheduler, engine and messenger pass it on."""

from __future__ import annotations

import msgspec

__all__ = ["PrefillChunk"]


class PrefillChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Positions ``start <= i < end`` of a request. The KV cache of all before them is there, or is
    filled by an earlier pass.
    """

    request_id: int
    pass_idx: int
    start: int
    end: int
    #: It ends the prefill.
    last: bool
    #: All pages of the request so far, on this node.
    page_indices: tuple[int, ...]
