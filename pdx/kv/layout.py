"""Where each byte of a node's KV memory lies. Pure arithmetic, shared by the ranks (which compute)
and the primary (which plans transfers)."""

from __future__ import annotations

import mmap

import msgspec

from pdx.checkpoint.layers import FULL_ATTENTION

__all__ = ["KvLayout", "NodeLayout", "kv_heads_of_rank"]


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The pages of one group of layers, dense, on one rank:
    ``[layer][page][kv head][part][token in page][head_dim]``.

    The parts are K and V. They lie side by side, so that a page of one layer, and any slice of its
    heads, is one contiguous run (what one remote write moves). All strides are bytes.
    """

    #: Those that draft come last.
    num_layers: int
    #: Heads that this rank holds.
    num_kv_heads: int
    head_dim: int
    #: Tokens in a page.
    page_size: int
    num_pages: int
    #: Bytes of one value.
    itemsize: int
    #: K and V; 1 where a token has one record for both (MLA: a head of latent and rope).
    num_parts: int = 2
    #: How many of the layers draft. They need the token after a position, so they lack the last
    #: position of a prompt.
    num_draft_layers: int = 0
    #: The group of layers whose pages these are.
    group: str = FULL_ATTENTION

    @property
    def token_run_bytes(self) -> int:
        """One token's values of one part of one head: what tokens in a page are apart."""
        return self.head_dim * self.itemsize

    @property
    def head_bytes(self) -> int:
        """All parts of one head in one page of one layer."""
        return self.num_parts * self.page_size * self.token_run_bytes

    @property
    def page_bytes(self) -> int:
        """One page of one layer."""
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


class NodeLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The KV memory of all ranks of a node: one range of addresses, rank after rank.

    A node with data parallel attention has ``dp_size`` groups of ``tp_size`` ranks, group after
    group. Each group holds the whole model's heads, and has requests and pages of its own.
    """

    #: The layout on every rank.
    rank: KvLayout
    tp_size: int
    #: KV heads of the model. Where they are fewer than ranks, groups of ranks hold the same head.
    num_kv_heads: int
    #: What each rank's memory begins at a multiple of: a (huge) page of the operating system, or a
    #: GPU's granularity.
    alignment: int = mmap.PAGESIZE
    dp_size: int = 1

    @property
    def rank_stride_bytes(self) -> int:
        """From one rank's memory to the next one's."""
        return -(-self.rank.total_bytes // self.alignment) * self.alignment

    @property
    def total_bytes(self) -> int:
        """From the first rank's memory to the end of the last one's."""
        num_ranks = self.dp_size * self.tp_size
        return (num_ranks - 1) * self.rank_stride_bytes + self.rank.total_bytes

    def rank_offset_bytes(self, dp_rank: int, rank_idx: int) -> int:
        """Where the memory of one rank of a group begins."""
        return (dp_rank * self.tp_size + rank_idx) * self.rank_stride_bytes

    @property
    def num_replicas(self) -> int:
        """How many ranks of a group hold each head."""
        return max(1, self.tp_size // self.num_kv_heads)

    def heads(self, rank_idx: int) -> range:
        """The model's heads that a rank holds: its place in its group says so."""
        return kv_heads_of_rank(self.num_kv_heads, self.tp_size, rank_idx)


def kv_heads_of_rank(num_kv_heads: int, tp_size: int, rank_idx: int) -> range:
    """The KV heads of a rank. With more ranks than heads, neighbouring ranks share one.

    ``tp_size`` divides the heads or is a multiple of them (checked where a node starts).
    """
    assert num_kv_heads % tp_size == 0 or tp_size % num_kv_heads == 0
    if tp_size > num_kv_heads:
        head = rank_idx // (tp_size // num_kv_heads)
        return range(head, head + 1)
    share = num_kv_heads // tp_size
    return range(rank_idx * share, (rank_idx + 1) * share)
