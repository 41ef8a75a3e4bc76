"""Linear layers on a CPU: which product reads the weights fastest.

Specification: ``kernels/reference/linear``. A decode step is bound by reading each weight once. For
bfloat16 torch's ``linear`` gives oneDNN the weights as its second factor, which it copies into
another order on every call. Native code reads them in their stored order: with AMX any number of
rows, without it few. Measured on one busy core of two with AMX, weights [2304, 768] not in the
cache, best of 60, in us, ``linear`` to AMX (to native code without AMX): 1 row 497 to 329 (353),
8 rows 540 to 325, 64 rows 765 to 503, 256 rows 1115 to 860, 1,024 rows 3726 to 3245. Weights
ordered once, at load, were no faster, and would be in memory twice where they are also embeddings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.cpu.native_ops import has_amx, native_ops

__all__ = ["linear", "linear_without_amx"]

#: Rows that are multiplied natively without AMX, where reading the weights takes longer than
#: multiplying.
_NATIVE_ROWS = 4
#: Above this, without AMX, the copy of the weights is paid for.
_FEW_ROWS = 64
#: A block of tokens, and the inputs of a tile of weights, of the AMX code.
_BLOCK, _DEPTH = 16, 32


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, I], weight [O, I], bias [O] -> [T, O] in x's dtype.

    With AMX, a bfloat16 row's bits do not depend on the other rows.
    """
    if x.dtype == torch.bfloat16 and x.numel() and weight.is_contiguous() and has_amx():
        return _linear_amx(x.contiguous(), weight, bias)
    return linear_without_amx(x, weight, bias)


def linear_without_amx(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same on any CPU."""
    num_rows = x.shape[0]
    if x.dtype != torch.bfloat16 or not 0 < num_rows <= _FEW_ROWS:
        return torch.nn.functional.linear(x, weight, bias)
    if num_rows <= _NATIVE_ROWS and weight.is_contiguous():
        return _native_linear(x.contiguous(), weight, bias)
    y = torch.mm(weight, x.T).T.contiguous()
    return y if bias is None else y.add_(bias)


def _linear_amx(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    padded_rows = num_rows if num_rows < _BLOCK else -(-num_rows // _BLOCK) * _BLOCK
    y = torch.empty(num_rows, num_out, dtype=x.dtype)
    scratch = torch.empty(padded_rows * -(-num_in // _DEPTH) * _DEPTH, dtype=x.dtype)
    native_ops().pdx_linear_amx(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        scratch.data_ptr(),
        num_rows,
        num_in,
        num_out,
    )
    return y


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
