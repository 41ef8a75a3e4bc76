"""What the gate compiles: calls of the public ops that together choose every configuration.

Heads and sizes are those of models (grouped heads 1, 4, 5, 8, 12; 128 wide, 64 wide, 80 and 256);
pages of 64 tokens are the usual ones, 16 the case in which a tile spans several pages.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdx.kernels.batch import RequestGroup
from pdx.kernels.kv_view import FLOAT8
from pdx.kernels.mla_decode import mla_decode
from pdx.kernels.mla_decode_float8 import mla_decode_float8
from pdx.kernels.mla_kv_append import mla_kv_append
from pdx.kernels.mla_prefill import mla_prefill
from pdx.kernels.paged_decode import paged_decode
from pdx.kernels.paged_prefill import paged_prefill
from pdx.kernels.progress_word import publish
from pdx.kernels.rope_kv_append import rope_kv_append
from tests.kernels.gate.dense_entries import DENSE_ENTRIES
from tests.kernels.gate.entry import ARCHS, BF16, Entry, meta

__all__ = ["ENTRIES"]

#: 16 rows never fill a warp group's matrix instruction, and need not: memory is the wall.
_DECODE = dict.fromkeys(ARCHS, ("mma", "cp_async", "wide_load"))
_PREFILL = {
    80: ("mma", "cp_async", "wide_load"),
    90: ("wgmma", "cp_async", "wide_load"),
    100: ("tcgen05", "cp_async", "wide_load"),
}
#: Converted records are registers before they are operands: they are not copied ahead.
_RECORDS = {90: ("wgmma", "wide_load"), 100: ("mma", "wide_load")}
_RELEASE = dict.fromkeys(ARCHS, ("system_release",))


def _group(num_requests: int, max_rows: int, context_len: int) -> RequestGroup:
    def array(length: int) -> Tensor:
        return meta(length, dtype=torch.int32)

    return RequestGroup(
        rows=slice(0, num_requests * max_rows),
        query_starts=array(num_requests),
        query_lens=array(num_requests),
        seq_lens=array(num_requests),
        seq_starts=array(num_requests),
        table_starts=array(num_requests),
        page_tables=array(4096),
        max_query_len=max_rows,
        max_seq_len=context_len,
        total_seq_len=num_requests * context_len,
    )


def _decode(
    groups: int,
    head_dim: int,
    page_size: int = 64,
    *,
    rows: int = 1,
    kv_dtype: torch.dtype = BF16,
    num_splits: int = 8,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Callable[[], object]:
    return lambda: paged_decode(
        meta(32 * rows, 8 * groups, head_dim),
        meta(4096, 8, 2, page_size, head_dim, dtype=kv_dtype),
        _group(32, rows, 4096),
        0.1,
        num_splits=num_splits,
        window=window,
        soft_cap=soft_cap,
    )


def _prefill(
    groups: int,
    head_dim: int,
    page_size: int = 64,
    *,
    kv_dtype: torch.dtype = BF16,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Callable[[], object]:
    return lambda: paged_prefill(
        meta(2048, 8 * groups, head_dim),
        meta(4096, 8, 2, page_size, head_dim, dtype=kv_dtype),
        _group(4, 512, 8192),
        0.1,
        window=window,
        soft_cap=soft_cap,
    )


def _append(num_heads: int, head_dim: int, kv_dtype: torch.dtype = BF16) -> Callable[[], object]:
    def call() -> object:
        q, k, v = meta(32, num_heads + 16, head_dim).split([num_heads, 8, 8], dim=1)
        cos, places = meta(32, head_dim // 2, dtype=torch.float32), meta(32, dtype=torch.int32)
        kv = meta(4096, 8, 2, 64, head_dim, dtype=kv_dtype)
        return rope_kv_append(q, k, v, cos, cos, kv, places, places)

    return call


def _mla_decode(num_heads: int, page_size: int = 64) -> Callable[[], object]:
    return lambda: mla_decode(
        meta(32, num_heads, 576),
        meta(4096, page_size, 576),
        _group(32, 1, 4096),
        0.1,
        512,
        num_splits=4,
    )


def _mla_decode_float8(num_heads: int) -> Callable[[], object]:
    return lambda: mla_decode_float8(
        meta(32, num_heads, 576),
        meta(4096, 64, 656, dtype=torch.uint8),
        _group(32, 1, 4096),
        0.1,
        512,
        num_splits=4,
    )


def _mla_append(width: int, kv_dtype: torch.dtype) -> Callable[[], object]:
    def call() -> object:
        latent, k_rope = meta(32, 576).split([512, 64], dim=1)
        cos, places = meta(32, 32, dtype=torch.float32), meta(32, dtype=torch.int32)
        kv = meta(4096, 64, width, dtype=kv_dtype)
        return mla_kv_append(latent, k_rope, cos, cos, kv, places, places)

    return call


def _mla_prefill() -> object:
    expanded = meta(8192, 16, 256)
    return mla_prefill(
        meta(2048, 16, 192),
        expanded[..., :128],
        meta(8192, 64),
        expanded[..., 128:],
        _group(4, 512, 8192),
        0.1,
    )


def _publish() -> None:
    publish(meta(1, dtype=torch.int64), meta(1, dtype=torch.int64), 3)


_ATTENTION = (
    Entry(name="decode g4 d128", call=_decode(4, 128), needs=_DECODE),
    Entry(name="decode g12 d128", call=_decode(12, 128), needs=_DECODE),
    Entry(name="decode g12 d128 page 16", call=_decode(12, 128, 16), needs=_DECODE),
    Entry(name="decode g4 d128 whole", call=_decode(4, 128, num_splits=1), needs=_DECODE),
    Entry(name="decode g4 d128 4 rows", call=_decode(4, 128, rows=4), needs=_DECODE),
    Entry(name="decode g12 d128 2 rows", call=_decode(12, 128, rows=2), needs=_DECODE),
    Entry(name="decode g8 d256 4 rows", call=_decode(8, 256, rows=4), needs=_DECODE),
    Entry(name="decode g12 d128 4 rows", call=_decode(12, 128, rows=4), needs=_PREFILL),
    Entry(
        name="decode g8 d64 window cap",
        call=_decode(8, 64, window=128, soft_cap=30.0),
        needs=_DECODE,
    ),
    Entry(name="decode g5 d80", call=_decode(5, 80), needs=_DECODE),
    Entry(name="decode g2 d256", call=_decode(2, 256), needs=_DECODE),
    Entry(
        name="decode g4 d128 float8",
        call=_decode(4, 128, kv_dtype=FLOAT8),
        archs=(90, 100),
        needs=_DECODE,
    ),
    Entry(name="prefill g4 d128", call=_prefill(4, 128), needs=_PREFILL),
    Entry(name="prefill g12 d128 page 16", call=_prefill(12, 128, 16), needs=_PREFILL),
    Entry(
        name="prefill g8 d64 window cap",
        call=_prefill(8, 64, window=128, soft_cap=30.0),
        needs=_PREFILL,
    ),
    Entry(name="prefill g2 d256", call=_prefill(2, 256), needs=_PREFILL),
    Entry(
        name="prefill g4 d128 float8",
        call=_prefill(4, 128, kv_dtype=FLOAT8),
        archs=(90, 100),
        needs=_PREFILL,
    ),
    Entry(name="mla decode 16 heads", call=_mla_decode(16), needs=_DECODE),
    Entry(name="mla decode 16 heads page 16", call=_mla_decode(16, 16), needs=_DECODE),
    Entry(name="mla decode 32 heads", call=_mla_decode(32), needs=_DECODE),
    Entry(name="mla decode 128 heads", call=_mla_decode(128), needs=_PREFILL),
    Entry(
        name="mla decode 16 heads float8",
        call=_mla_decode_float8(16),
        archs=(90, 100),
        needs=_DECODE,
    ),
    Entry(
        name="mla decode 32 heads float8",
        call=_mla_decode_float8(32),
        archs=(90, 100),
        needs=_RECORDS,
    ),
    Entry(
        name="mla decode 128 heads float8",
        call=_mla_decode_float8(128),
        archs=(90, 100),
        needs=_RECORDS,
    ),
    Entry(name="mla append", call=_mla_append(576, BF16)),
    Entry(name="mla append float8", call=_mla_append(656, torch.uint8), archs=(90, 100)),
    Entry(name="mla prefill", call=_mla_prefill, needs=_PREFILL),
    Entry(name="append 32 8 d128", call=_append(32, 128)),
    Entry(name="append 96 8 d128 float8", call=_append(96, 128, FLOAT8), archs=(90, 100)),
    Entry(name="progress word", call=_publish, needs=_RELEASE),
)
ENTRIES = (*_ATTENTION, *DENSE_ENTRIES)
