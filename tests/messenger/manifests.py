"""What a small node says of itself; tests change what they are about."""

from __future__ import annotations

from pdx.checkpoint.layers import full_attention
from pdx.messenger.manifest import Manifest

__all__ = ["ONE_RANK"]

ONE_RANK = Manifest(
    weights_id="w",
    text_id="t",
    layer_groups=(full_attention(2),),
    num_kv_heads=1,
    head_dim=8,
    dtype="float32",
    page_size=16,
    tp_size=1,
    kv_layout="head-major",
    num_pages=4,
)
