"""Triton's interpreter with right arithmetic in bfloat16 and float8. Ranks with
``PDX_KERNELS=interpret``, and the interpreter suite.

The stock interpreter of Triton 3.6 keeps these types as unsigned integers and applies numpy to
their bits: products are garbage, casts truncate. Here each operation widens to float32, computes,
and rounds to the nearest even (float8 saturates), which is what the compiled kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import min_dot_size
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

__all__ = ["ExactBuilder", "ExactReduce", "install"]

_FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
#: The value of each of the 256 codes.
_FLOAT8_VALUES = {
    ty: torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    for ty, dtype in _FLOAT8.items()
}
Array = np.ndarray[Any, Any]


def _is_raw(handle: TensorHandle) -> bool:
    ty = handle.dtype.scalar
    return ty == tl.bfloat16 or ty in _FLOAT8


def _values(handle: TensorHandle) -> Array:
    """The numbers that a handle means."""
    ty, data = handle.dtype.scalar, handle.data
    values: Array = data
    if ty == tl.bfloat16:
        values = (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif ty in _FLOAT8:
        values = _FLOAT8_VALUES[ty][data]
    return values


def _rounded(values: Array, ty: tl.dtype) -> TensorHandle:
    """Numbers as bfloat16 or float8."""
    wide = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    if ty == tl.bfloat16:
        data = wide.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    else:
        limit = torch.finfo(_FLOAT8[ty]).max
        data = wide.clamp(-limit, limit).to(_FLOAT8[ty]).view(torch.uint8).numpy()
    return TensorHandle(data.reshape(np.shape(values)), ty)


class ExactBuilder(InterpreterBuilder):  # type: ignore[misc]
    """Takes the place of the interpreter's builder: one method an IR operation."""

    def __init__(self) -> None:
        super().__init__()
        # Refuse the dots that the compiler refuses.
        self.codegen_fns["min_dot_size"] = min_dot_size(GPUTarget("cuda", 90, 32))

    def _elementwise(
        self, stock: Callable[..., TensorHandle], *args: Any, ty: tl.dtype
    ) -> TensorHandle:
        *handles, op = args
        if not any(map(_is_raw, handles)):
            return stock(*args)
        result = op(*map(_values, handles))
        return TensorHandle(result, ty) if result.dtype == np.bool_ else _rounded(result, ty)

    def unary_op(self, arg: TensorHandle, op: Callable[..., Array]) -> TensorHandle:
        return self._elementwise(super().unary_op, arg, op, ty=arg.dtype.scalar)

    def binary_op(
        self, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., Array]
    ) -> TensorHandle:
        return self._elementwise(super().binary_op, lhs, rhs, op, ty=lhs.dtype.scalar)

    def ternary_op(self, *args: Any) -> TensorHandle:
        return self._elementwise(super().ternary_op, *args, ty=args[2].dtype.scalar)

    def create_select(
        self, cond: TensorHandle, lhs: TensorHandle, rhs: TensorHandle
    ) -> TensorHandle:
        return TensorHandle(np.where(cond.data, lhs.data, rhs.data), rhs.dtype.scalar)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        if not _is_raw(z):
            return super().create_fma(x, y, z)
        wide = _values(x).astype(np.float64) * _values(y) + _values(z)
        return _rounded(wide, z.dtype.scalar)

    def cast_impl(self, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        ty = dst_type.scalar
        if ty == tl.bfloat16 or ty in _FLOAT8:
            return _rounded(_values(src), ty)
        return TensorHandle(_values(src).astype(interpreter._get_np_dtype(ty)), ty)

    def create_fp_to_fp(
        self, src: TensorHandle, dst_type: tl.dtype, rounding_mode: Any
    ) -> TensorHandle:
        if rounding_mode not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError(f"rounding {rounding_mode}")
        return self.cast_impl(src, dst_type)

    def get_bf16(self, value: float) -> TensorHandle:
        return _rounded(np.array([value], np.float32), tl.bfloat16)

    def create_dot(
        self, a: TensorHandle, b: TensorHandle, d: TensorHandle, precision: Any, imprecise: int
    ) -> TensorHandle:
        if d.data.dtype != np.float32:
            return super().create_dot(a, b, d, precision, imprecise)
        x, y = (np.ascontiguousarray(_values(each), dtype=np.float32) for each in (a, b))
        return TensorHandle(np.matmul(x, y) + d.data, d.dtype.scalar)


class ExactReduce(interpreter.ReduceOps):  # type: ignore[misc]
    """Sums of the types that numpy does not know."""

    def sum(self, input: tl.tensor) -> tl.tensor:  # noqa: A002 (the stock name)
        handle = input.handle
        if not _is_raw(handle):
            return super().sum(input)
        total = np.sum(_values(handle), axis=self.axis, keepdims=self.keep_dims)
        rounded = _rounded(np.atleast_1d(total), handle.dtype.scalar).data
        return self.to_tensor(
            rounded.reshape(np.shape(total)) if np.ndim(total) else rounded[0], input.dtype
        )


def install() -> None:
    """Replace the interpreter's arithmetic in this process. Before the first launch."""
    np.seterr(all="ignore")  # a GPU does not complain about exp2(-inf) or log2(0)
    builder = ExactBuilder()
    interpreter.interpreter_builder = builder
    interpreter.interpreter_semantic.builder = builder
    interpreter.ReduceOps = ExactReduce
