"""A captured graph on a CPU: what a call launches is written down once, and replayed as it was.

As on a GPU, a replay has no Python of the call's, its arguments are those of the capture, and its
results come to the same memory. What a capture does not allow is an error here too: to ask a
tensor for a number, to make a size of one, to bring a value of the host into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from pdx.kernels.graphs import CaptureRefused

__all__ = ["Recorder"]

#: They wait for the device, or bring the host's values.
_FORBIDDEN = (
    *("_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "bincount", "equal"),
    *("lift_fresh", "lift_fresh_copy", "is_nonzero", "resize_", "set_"),
)
_MEMORY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")


def _is_view(result: Any, tensors: list[Tensor]) -> bool:
    """Whether all of a result lies in memory of the arguments (`contiguous` may, or not)."""
    ours = {each.untyped_storage().data_ptr() for each in tensors}
    return all(each.untyped_storage().data_ptr() in ours for each in tree_leaves(result))


def _copy(source: Any, target: Any) -> None:
    for ours, theirs in zip(tree_leaves(target), tree_leaves(source), strict=True):
        ours.copy_(theirs)


class _Graph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.output = torch.empty(0)
        self.calls: list[Callable[[], object]] = []
        #: For a test that looks at what each launch of a replay has done.
        self.behind_each: Callable[[], object] = lambda: None
        self._in_kernel = False

    def launch(self, stock: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        self.calls.append(lambda: stock(*args, **kwargs))
        self._in_kernel = True
        try:
            stock(*args, **kwargs)
        finally:
            self._in_kernel = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if self._in_kernel:  # the interpreter's own
            return result
        tensors = [arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, Tensor)]
        by_mask = name == "index" and any(each.dtype == torch.bool for each in tensors[1:])
        if name in _FORBIDDEN or by_mask:
            raise CaptureRefused(f"{name} in a captured step")
        if func._schema.is_mutable:
            self.calls.append(lambda: func(*args, **kwargs))
        elif name not in _MEMORY and not _is_view(result, tensors):
            self.calls.append(lambda: _copy(func(*args, **kwargs), result))
        return result

    def replay(self) -> None:
        for call in self.calls:
            call()
            self.behind_each()


class Recorder:
    """A :class:`pdx.kernels.graphs.GraphCapture` over interpreted kernels."""

    def __init__(self) -> None:
        self.graphs: list[_Graph] = []

    def capture(self, run: Callable[[], Tensor]) -> _Graph:
        run()
        graph = _Graph()
        with _launches_to(graph), graph:
            graph.output = run()
        self.graphs.append(graph)
        return graph


@contextmanager
def _launches_to(graph: _Graph) -> Iterator[None]:
    stock = InterpretedFunction.run

    def run(kernel: InterpretedFunction, *args: Any, **kwargs: Any) -> None:
        graph.launch(stock, kernel, *args, **kwargs)

    InterpretedFunction.run = run
    try:
        yield
    finally:
        InterpretedFunction.run = stock
