"""Triton's names of dtypes, and the dtype that attention kernels compute in."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from pdx.kernels.kv_view import FLOAT8

__all__ = ["compute_dtype", "triton_dtype"]

_TRITON = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
    FLOAT8: tl.float8e4nv,
}


def compute_dtype(q: Tensor, kv: Tensor) -> tl.dtype:
    """float8 holds exactly in float16, whose conversion is one instruction; bfloat16's is three."""
    return tl.float16 if kv.dtype == FLOAT8 else triton_dtype(q.dtype)


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """The kernels' name of a dtype."""
    return _TRITON[dtype]
