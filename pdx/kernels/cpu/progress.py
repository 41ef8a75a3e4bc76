"""The progress word of a CPU rank: a native release store and wake. The rank's main thread."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from mmap import mmap

from pdx.errors import ConfigError
from pdx.installed import native_library

__all__ = ["ProgressWord"]


class ProgressWord:
    """The uint64 at the start of a shared mapping, and the eventfd that wakes its reader.

    Python has no store with release order (and none that is sure to be one instruction), hence the
    library. The mapping must outlive this object; the caller owns both the mapping and the
    descriptor.
    """

    def __init__(self, memory: mmap, eventfd: int) -> None:
        self._publish = _load()
        # Holds a reference to the mapping's buffer, so that the address stays valid.
        self._word = ctypes.c_uint64.from_buffer(memory)
        self._address = ctypes.addressof(self._word)
        self._eventfd = eventfd

    def publish(self, value: int) -> None:
        """Make ``value``, and all KV written before this call, visible to the workers."""
        self._publish(self._address, value, self._eventfd)

    @property
    def value(self) -> int:
        """What was published last; for tests and statistics."""
        return self._word.value


def _load() -> Callable[[int, int, int], None]:
    try:
        library = ctypes.CDLL(str(native_library("kernels/cpu/native/libpdx_progress.so")))
    except OSError as error:
        raise ConfigError(
            f"cannot load libpdx_progress.so: {error}",
            hint="build the native libraries: pip install -e . (or scripts/setup)",
        ) from error
    function = library.pdx_publish
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
    function.restype = None
    return function
