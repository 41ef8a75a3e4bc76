"""Which kernels a public op launches, with what specialization: taken from a call on no memory.

The op gets tensors on torch's `meta` device, so its own code decides everything that a launch on a
GPU would have: configuration, constants, which numbers are divisible by 16. What the gate compiles
is what runs.
"""

from __future__ import annotations

import ast
import hashlib
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from pdx.kernels import decisions

__all__ = ["Launch", "launches_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel as one launch would have it compiled."""

    name: str
    arch: int
    grid: tuple[int, ...]
    source: ASTSource
    options: Any

    @property
    def target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    @property
    def key(self) -> str:
        """Changes with whatever the machine code depends on: code (not comments), constants,
        specialization, options, Triton."""
        parts = [
            *_sources(self.source.fn),
            sorted(self.source.signature.items()),
            sorted((path, str(value)) for path, value in self.source.constants.items()),
            sorted((path, str(value)) for path, value in self.source.attrs.items()),
            self.arch,
            (self.options.num_warps, self.options.num_stages, self.options.maxnreg),
            triton.__version__,
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def launches_of(name: str, call: Callable[[], object], arch: int) -> list[Launch]:
    """What ``call`` launches on a GPU of this architecture, named ``name/kernel``."""
    launches: list[Launch] = []

    def record(kernel: JITFunction, *args: Any, grid: tuple[int, ...], **kwargs: Any) -> None:
        kwargs.pop("warmup")
        module = kernel.fn.__module__.rpartition(".")[2]
        which = kernel.fn.__name__.removesuffix("_kernel")  # a module's only one is `_kernel`
        launches.append(_launch(f"{name}/{module}{which}", kernel, arch, grid, args, kwargs))

    with _pretending(arch, record):
        call()
    return launches


@contextmanager
def _pretending(arch: int, record: Callable[..., None]) -> Iterator[None]:
    run, arch_of = JITFunction.run, decisions.arch_of
    JITFunction.run = record
    decisions.arch_of = lambda device: arch
    try:
        yield
    finally:
        JITFunction.run, decisions.arch_of = run, arch_of


def _launch(
    name: str, kernel: JITFunction, arch: int, grid: tuple[int, ...], args: Any, kwargs: Any
) -> Launch:
    backend = make_backend(GPUTarget("cuda", arch, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*args, **kwargs)
    options, signature, constants, attrs = kernel._pack_args(
        backend, kwargs, bound, specialization, options
    )
    source = ASTSource(kernel, signature, constants, attrs)
    return Launch(name=name, arch=arch, grid=grid, source=source, options=options)


def _sources(kernel: JITFunction, seen: set[str] | None = None) -> list[str]:
    """The code of a kernel and of the project's functions that it calls, without comments."""
    seen = set() if seen is None else seen
    if (name := f"{kernel.fn.__module__}.{kernel.fn.__name__}") in seen:
        return []
    seen.add(name)
    tree = ast.parse(textwrap.dedent(kernel.src))
    called = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    others = [kernel.fn.__globals__.get(each) for each in dict.fromkeys(called)]
    nested = [other for other in others if isinstance(other, JITFunction)]
    return [ast.dump(tree), *(text for other in nested for text in _sources(other, seen))]
