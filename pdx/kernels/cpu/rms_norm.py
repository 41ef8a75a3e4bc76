"""RMSNorm on a CPU: one pass over memory, in native code.

Specification: ``kernels/reference/rms_norm``, with the same roundings. Measured on one core of two,
bfloat16, rows of 576, against the reference: 4.5 us to 23 us for one row,
0.46 ms to 1.3 ms for 1,024.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.cpu.native_ops import NATIVE_DTYPES, native_ops
from pdx.kernels.reference.rms_norm import rms_norm as reference

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H], weight [H] -> [..., H] in x's dtype."""
    if x.dtype not in NATIVE_DTYPES or weight.dtype != x.dtype:
        return reference(x, weight, eps)
    x, size = x.contiguous(), x.shape[-1]
    y = torch.empty_like(x)
    native_ops().pdx_rms_norm(
        x.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        x.numel() // size,
        size,
        eps,
        x.dtype == torch.bfloat16,
    )
    return y
