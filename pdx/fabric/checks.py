"""What a fabric refuses in its arguments, said once for the native and the simulated one. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdx.errors import FabricError
from pdx.fabric.interface import PageBatch

__all__ = ["check_batch", "check_unsigned", "check_word_address"]

_UINT64 = (1 << 64) - 1
_UINT32 = (1 << 32) - 1


def check_batch(batch: PageBatch) -> None:
    """Refuse what makes no sense whatever the regions are.

    Raises:
        FabricError: with what is wrong.
    """
    _check_pages(batch.src_pages)
    _check_pages(batch.dst_pages)
    if len(batch.src_pages) != len(batch.dst_pages):
        raise FabricError(
            f"{len(batch.src_pages)} source pages do not match {len(batch.dst_pages)} target pages"
        )
    if batch.page_bytes <= 0 or batch.num_layers < 0:
        raise FabricError("a batch needs page_bytes above 0 and no negative number of layers")
    if batch.num_layers > _UINT32:
        raise FabricError(f"a batch of {batch.num_layers} layers: it may have {_UINT32}")
    check_unsigned("page_bytes", batch.page_bytes)
    check_unsigned("src_offset", batch.src_offset)
    check_unsigned("dst_offset", batch.dst_offset)
    check_unsigned("src_layer_stride", batch.src_layer_stride)
    check_unsigned("dst_layer_stride", batch.dst_layer_stride)
    check_unsigned("src_page_stride", batch.src_page_stride or 0)
    check_unsigned("dst_page_stride", batch.dst_page_stride or 0)


def check_unsigned(name: str, value: int) -> int:
    """The value, if 64 bits hold it.

    Raises:
        FabricError: they do not.
    """
    if not 0 <= value <= _UINT64:
        raise FabricError(f"{name} is {value}, which is not an unsigned 64-bit number")
    return value


def check_word_address(address: int) -> int:
    """The address, if a progress word may lie there.

    Raises:
        FabricError: it may not.
    """
    if address <= 0 or address % 8:
        raise FabricError(f"a progress word at {address:#x} is not 8-byte aligned memory")
    return check_unsigned("word_address", address)


def _check_pages(pages: NDArray[np.uint32]) -> None:
    if pages.ndim != 1 or pages.dtype != np.uint32:
        raise FabricError(f"page indices are a {pages.ndim}-d array of {pages.dtype}, not uint32")
