"""Batches for the tests, and what they must do, said once in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdx.fabric import PageBatch

__all__ = ["apply", "dense", "random_batch"]


def dense(
    src_pages: list[int], dst_pages: list[int], page_bytes: int, num_layers: int, num_pages: int
) -> PageBatch:
    """Layers of ``num_pages`` pages, page by page, on both sides."""
    return PageBatch(
        src_pages=np.array(src_pages, np.uint32),
        dst_pages=np.array(dst_pages, np.uint32),
        page_bytes=page_bytes,
        num_layers=num_layers,
        src_layer_stride=num_pages * page_bytes,
        dst_layer_stride=num_pages * page_bytes,
    )


def random_batch(rng: np.random.Generator, num_bytes: int) -> PageBatch:
    """Random sizes, offsets and strides inside ``num_bytes`` on both sides; no target twice.

    Page lists have runs of neighbours, so that writes are merged.
    """
    page_bytes = int(rng.choice([1, 7, 64, 1000, 4096]))
    num_layers = int(rng.integers(1, 5))

    def side() -> dict[str, Any]:
        offset = int(rng.integers(0, 300))
        page_stride = page_bytes + int(rng.choice([0, 0, 128]))
        room = (num_bytes - offset) // num_layers
        total = min(room // page_stride, 600)
        return {
            "offset": offset,
            "page_stride": page_stride,
            "layer_stride": total * page_stride + int(rng.integers(0, room % page_stride + 1)),
            "total": total,
        }

    src, dst = side(), side()
    count = int(rng.integers(1, min(src["total"], dst["total"]) + 1))
    return PageBatch(
        src_pages=_runs(rng, src["total"], count),
        dst_pages=_runs(rng, dst["total"], count),
        page_bytes=page_bytes,
        num_layers=num_layers,
        src_offset=src["offset"],
        dst_offset=dst["offset"],
        src_layer_stride=src["layer_stride"],
        dst_layer_stride=dst["layer_stride"],
        src_page_stride=src["page_stride"],
        dst_page_stride=dst["page_stride"],
    )


def apply(batch: PageBatch, src: NDArray[np.uint8], dst: NDArray[np.uint8]) -> None:
    """What the batch does to the target memory."""
    src_stride = batch.page_bytes if batch.src_page_stride is None else batch.src_page_stride
    dst_stride = batch.page_bytes if batch.dst_page_stride is None else batch.dst_page_stride
    for layer in range(batch.num_layers):
        for s, d in zip(batch.src_pages.tolist(), batch.dst_pages.tolist(), strict=True):
            start = batch.src_offset + layer * batch.src_layer_stride + s * src_stride
            end = batch.dst_offset + layer * batch.dst_layer_stride + d * dst_stride
            dst[end : end + batch.page_bytes] = src[start : start + batch.page_bytes]


def _runs(rng: np.random.Generator, total: int, count: int) -> NDArray[np.uint32]:
    """``count`` of ``total`` page indices, each once: shuffled runs of one to eight."""
    cuts = np.cumsum(rng.integers(1, 9, total))
    runs = np.split(np.arange(total, dtype=np.uint32), cuts[cuts < total])
    order = rng.permutation(len(runs))
    return np.concatenate([runs[i] for i in order])[:count]
