"""What the interpreter checks beside the arithmetic: memory, races between programs, their order.

A GPU would not tell either of these:

- an active lane of a load, store or atomic outside every tensor of the launch is a MemoryFault;
- two programs that touch the same byte, one of them writing, with no release and acquire between
  them, are a RaceFault (as are two lanes of one store);
- the programs of a launch run in a seeded random order;
- a ``tl.multiple_of`` that is not true is a MemoryFault (compiled, it gives wrong addresses).

Not seen: what happens inside one program (barriers, asynchronous copies), alignment, layouts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, TensorHandle

from pdx.kernels.interpreter import ExactBuilder, ExactReduce

Array = np.ndarray[Any, Any]

__all__ = ["MemoryFault", "RaceFault", "install", "without_race_checks"]


class MemoryFault(Exception):
    """An access outside the tensors of the launch, or a false promise about a number."""


class RaceFault(Exception):
    """Two programs, one byte, at least one write, no order."""


class _Races:
    """For each byte of the launch's tensors who wrote it and who read it last.

    Programs are counted from 1; 0: nobody. ``_MANY`` readers are not told apart.
    """

    _MANY = -1

    def __init__(self, sizes: list[int]) -> None:
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._writer = np.zeros(self._starts[-1], np.int32)
        self._reader = np.zeros(self._starts[-1], np.int32)
        #: By address of an atomic: the programs whose writes a release there has published.
        self._published: dict[int, set[int]] = {}
        #: By program: those whose writes it has acquired.
        self._acquired: dict[int, set[int]] = {}

    def touch(self, program: int, tensor: Array, offset: Array, size: int, kind: str) -> None:
        first = offset + self._starts[tensor]
        touched = np.unique(first)
        if kind == "store" and touched.size < first.size:
            raise RaceFault(f"lanes of one store by program {program} write the same place")
        touched = (touched[:, None] + np.arange(size)).ravel()
        known = self._acquired.get(program, set()) | {0, program}
        before = set(np.unique(self._writer[touched]).tolist()) - known
        if kind == "store":
            before |= set(np.unique(self._reader[touched]).tolist()) - known
        if before:
            raise RaceFault(
                f"program {program} has a {kind} where {sorted(before)} were, unordered"
            )
        if kind == "store":
            self._writer[touched] = program
        else:
            last = self._reader[touched]
            self._reader[touched] = np.where((last == 0) | (last == program), program, self._MANY)

    def synchronize(self, program: int, addresses: Array, order: str) -> None:
        for address in np.unique(addresses).tolist():
            if "ACQUIRE" in order:
                self._acquired.setdefault(program, set()).update(self._published.get(address, ()))
            if "RELEASE" in order:
                seen = self._acquired.get(program, set()) | {program}
                self._published.setdefault(address, set()).update(seen)


class _Launch:
    """The tensors of a launch, sorted by address, and the program that runs."""

    def __init__(self, tensors: list[torch.Tensor], races: bool) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        self._begins = np.array(sorted(storages), dtype=np.uint64)
        sizes = [storages[begin] for begin in sorted(storages)]
        self._ends = self._begins + np.array(sizes, dtype=np.uint64)
        self.races = _Races(sizes) if races else None
        self.program = 0

    def access(self, pointers: TensorHandle, mask: Any, kind: str) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        active = mask.data if mask is not None else np.True_
        address, active = np.broadcast_arrays(pointers.data, active)
        address = address[active].ravel()
        if not address.size:
            return
        tensor = np.searchsorted(self._begins, address, side="right").astype(np.int64) - 1
        offset = address.astype(np.int64) - self._begins[tensor].astype(np.int64)
        outside = (tensor < 0) | (address + np.uint64(size) > self._ends[tensor])
        if outside.any():
            raise MemoryFault(
                f"{kind} by program {self.program}: {int(outside.sum())} of {address.size} lanes "
                f"outside; the first {int(offset[outside][0]):+d} bytes into a tensor"
            )
        if self.races is not None and kind != "atomic":
            self.races.touch(self.program, tensor, offset, size, kind)


class _CheckedBuilder(ExactBuilder):
    """Sees every access before it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.race_checks = True
        self.launch: _Launch | None = None
        self._order: list[int] = []
        self._random = random.Random(0)

    def set_grid_dim(self, nx: int, ny: int, nz: int) -> None:
        super().set_grid_dim(nx, ny, nz)
        self._order = list(range(nx * ny * nz))
        self._random.shuffle(self._order)

    def set_grid_idx(self, x: int, y: int, z: int) -> None:
        _, ny, nz = self.grid_dim
        program = self._order[(x * ny + y) * nz + z]
        if self.launch is not None:
            self.launch.program = program + 1
        super().set_grid_idx(program // (ny * nz), program // nz % ny, program % nz)

    def _access(self, pointers: TensorHandle, mask: Any, kind: str) -> None:
        if self.launch is not None:
            self.launch.access(pointers, mask, kind)

    def _atomic(self, pointers: TensorHandle, mask: Any, order: Any) -> None:
        self._access(pointers, mask, "atomic")
        if self.launch is not None and self.launch.races is not None:
            self.launch.races.synchronize(self.launch.program, pointers.data, str(order))

    def create_masked_load(self, ptrs: TensorHandle, mask: Any, *rest: Any) -> TensorHandle:
        self._access(ptrs, mask, "load")
        return super().create_masked_load(ptrs, mask, *rest)

    def create_masked_store(self, ptrs: TensorHandle, value: Any, mask: Any, *rest: Any) -> Any:
        self._access(ptrs, mask, "store")
        return super().create_masked_store(ptrs, value, mask, *rest)

    def create_atomic_rmw(
        self, op: Any, ptr: TensorHandle, val: Any, mask: Any, sem: Any, scope: Any
    ) -> TensorHandle:
        self._atomic(ptr, mask, sem)
        return super().create_atomic_rmw(op, ptr, val, mask, sem, scope)

    def create_atomic_cas(
        self, ptr: TensorHandle, cmp: Any, val: Any, sem: Any, scope: Any
    ) -> TensorHandle:
        self._atomic(ptr, None, sem)
        return super().create_atomic_cas(ptr, cmp, val, sem, scope)


_builder = _CheckedBuilder()


class _CheckedExecutor(GridExecutor):  # type: ignore[misc]
    """Tells the builder of each launch's tensors."""

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> Any:
        args, named = super()._init_args_hst(args_dev, kwargs)
        tensors = [arg for arg in (*args, *named.values()) if isinstance(arg, torch.Tensor)]
        _builder.launch = _Launch(tensors, _builder.race_checks)
        return args, named

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        _patched.clear()
        try:
            super().__call__(*args, **kwargs)
        finally:
            _builder.launch = None


#: Functions whose module's `tl` has been replaced for this launch.
_patched: set[object] = set()


def _call_nested(function: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """A jitted function called by another. The stock one replaces `tl` at each call, 1 ms each."""
    if function.fn not in _patched:
        _patched.add(function.fn)
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


def _patch_tensor(tensor: type, scope: Any) -> None:
    _stock_patch_tensor(tensor, scope)
    # The stock one turns an array of one element into an int in a way that numpy deprecates.
    scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))


def _set_attr(handle: TensorHandle, key: str, values: list[int]) -> None:
    if key == "tt.divisibility" and handle.data.size == 1 and int(handle.data.item()) % values[0]:
        raise MemoryFault(f"multiple_of: {int(handle.data.item())} is no multiple of {values[0]}")
    _stock_set_attr(handle, key, values)


_stock_patch_tensor = interpreter._patch_lang_tensor
_stock_set_attr = TensorHandle.set_attr


def install() -> None:
    """Replace the interpreter's parts in this process. Before the first launch, once."""
    np.seterr(all="ignore")  # a GPU does not complain about exp2(-inf) or log2(0)
    triton.knobs.compilation.front_end_debugging = True  # faults come out as they are
    interpreter.interpreter_builder = _builder
    interpreter.interpreter_semantic.builder = _builder
    interpreter.GridExecutor = _CheckedExecutor
    interpreter.ReduceOps = ExactReduce
    interpreter._patch_lang_tensor = _patch_tensor
    InterpretedFunction.__call__ = _call_nested
    TensorHandle.set_attr = _set_attr


@contextmanager
def without_race_checks() -> Iterator[None]:
    """For launches over tensors of gigabytes: the checks keep 8 bytes for each of theirs."""
    _builder.race_checks = False
    try:
        yield
    finally:
        _builder.race_checks = True
