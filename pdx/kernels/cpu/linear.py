"""Linear layers on a CPU: which product reads the weights fastest.

Specification: ``kernels/reference/linear``. A decode step is bound by reading each weight once. For
bfloat16 torch's ``linear`` gives oneDNN the weights as its second factor, which it copies into
another order on every call. Native code reads them in their stored order: with AMX any number of
rows, without it few. Measured on two cores with AMX, a Qwen3 of 107 million parameters, this and
chunk attention with AMX against both without, median of 5: a prompt of 1,024 tokens 361 ms to 524,
a step of 8 requests 46.9 to 58.4, of one 43.0 to 41.8. Weights ordered once, at load, were no
faster, and would be in memory twice where they are also embeddings.
"""

from __future__ import annotations

from collections.abc import Callable

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
        return _linear_few_rows(x.contiguous(), weight, bias)
    y = torch.mm(weight, x.T).T.contiguous()
    return y if bias is None else y.add_(bias)


def _linear_amx(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_rows, num_in = x.shape
    padded_rows = num_rows if num_rows < _BLOCK else -(-num_rows // _BLOCK) * _BLOCK
    scratch = torch.empty(padded_rows * -(-num_in // _DEPTH) * _DEPTH, dtype=x.dtype)
    return _native(native_ops().pdx_linear_amx, x, weight, bias, scratch)


def _linear_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _native(native_ops().pdx_linear, x, weight, bias, torch.empty(x.shape))


def _native(
    op: Callable[..., None], x: Tensor, weight: Tensor, bias: Tensor | None, scratch: Tensor
) -> Tensor:
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    y = torch.empty(num_rows, num_out, dtype=x.dtype)
    op(
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
