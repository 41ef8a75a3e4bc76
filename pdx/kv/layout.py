"""Where each byte of a rank's KV memory lies. Pure arithmetic, shared by the rank (which computes)
and the primary (which plans transfers)."""

from __future__ import annotations

import msgspec

__all__ = ["KvLayout"]


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """``[layer][page][kv head][K|V][token in page][head_dim]``, dense, on one rank.

    K and V of a head lie side by side, so that a page of one layer, and any slice of its heads, is
    one contiguous run (what one remote write moves). All strides are bytes.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    #: Tokens in a page.
    page_size: int
    num_pages: int
    #: Bytes of one K or V value.
    itemsize: int

    @property
    def head_bytes(self) -> int:
        """K and V of one head in one page of one layer."""
        return 2 * self.page_size * self.head_dim * self.itemsize

    @property
    def page_bytes(self) -> int:
        """One page of one layer: the atom of a transfer with equal layouts on both sides."""
        return self.num_kv_heads * self.head_bytes

    @property
    def layer_stride_bytes(self) -> int:
        """From a page of one layer to the same page of the next."""
        return self.num_pages * self.page_bytes

    @property
    def total_bytes(self) -> int:
        """All layers of all pages."""
        return self.num_layers * self.layer_stride_bytes

    @property
    def token_bytes(self) -> int:
        """KV of one token over all layers."""
        return self.num_layers * self.page_bytes // self.page_size

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens of one request."""
        return -(-num_tokens // self.page_size)

    def page_offset_bytes(self, layer_idx: int, page_idx: int) -> int:
        """Offset of a page of a layer from the start of the memory."""
        return layer_idx * self.layer_stride_bytes + page_idx * self.page_bytes
