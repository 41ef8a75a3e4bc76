"""The progress word of a CPU rank: a native release store. The rank's main thread."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from torch import Tensor

from pdx.errors import ConfigError
from pdx.installed import native_library

__all__ = ["publish"]


def publish(word: Tensor, base: Tensor, step: int) -> None:
    """Store ``base + step``, so that whoever sees it also sees all that was written before.

    Python has no store with release order (and none that is sure to be one instruction), hence the
    library.

    Args:
        word: int64 [1], in memory that the fabric workers read.
        base: int64 [1].
        step: of the pass, from 1.
    """
    _store()(word.data_ptr(), int(base) + step)


@functools.cache
def _store() -> Callable[[int, int], None]:
    try:
        library = ctypes.CDLL(str(native_library("kernels/cpu/native/libpdx_progress.so")))
    except OSError as error:
        raise ConfigError(
            f"cannot load libpdx_progress.so: {error}",
            hint="build the native libraries: pip install -e . (or scripts/setup)",
        ) from error
    function: Callable[[int, int], None] = library.pdx_publish
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64]  # type: ignore[attr-defined]
    function.restype = None  # type: ignore[attr-defined]
    return function
