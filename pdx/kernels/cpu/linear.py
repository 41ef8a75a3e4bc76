"""Linear layers on a CPU: which product reads the weights fastest.

Specification: ``kernels/reference/linear``. A decode step is bound by reading each weight once. For
bfloat16 and few rows, torch's ``linear`` gives oneDNN the weights as its second factor, which it
copies into another order on every call. Measured on two busy cores with AMX, weights [2304, 768]
not in the cache, best of 25, in us: 1 row ``linear`` 613, ``mv`` 440, native 376; 4 rows ``linear``
1018, native 691; 8 rows ``linear`` 715, with the weights as the first factor 528, native 656.
Weights ordered once, at load, were no faster, and would be in memory twice where they are also
embeddings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.cpu.native_ops import native_ops

__all__ = ["linear"]

#: Rows that are multiplied natively, where reading the weights takes longer than multiplying.
_NATIVE_ROWS = 4
#: Above this the copy of the weights is paid for: 1,024 rows are 1.5 times as fast with it.
_FEW_ROWS = 64


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, I], weight [O, I], bias [O] -> [T, O] in x's dtype."""
    num_rows = x.shape[0]
    if x.dtype != torch.bfloat16 or not 0 < num_rows <= _FEW_ROWS:
        return torch.nn.functional.linear(x, weight, bias)
    if num_rows <= _NATIVE_ROWS and weight.is_contiguous():
        return _native_linear(x.contiguous(), weight, bias)
    y = torch.mm(weight, x.T).T.contiguous()
    return y if bias is None else y.add_(bias)


def _native_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_rows, num_out = x.shape[0], weight.shape[0]
    y = torch.empty(num_rows, num_out, dtype=x.dtype)
    scratch = torch.empty(x.shape)
    native_ops().pdx_linear(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        scratch.data_ptr(),
        num_rows,
        x.shape[1],
        num_out,
    )
    return y
