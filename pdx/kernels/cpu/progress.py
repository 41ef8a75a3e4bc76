"""The progress word of a CPU rank: a native release store and wake. The rank's main thread."""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Callable
from mmap import mmap
from pathlib import Path

from pdx.errors import ConfigError

__all__ = ["ProgressWord"]

_LIBRARY = "pdx/kernels/cpu/native/libpdx_progress.so"


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
        function = ctypes.CDLL(str(_library_path())).pdx_publish
    except OSError as error:
        raise ConfigError(
            f"cannot load libpdx_progress.so: {error}",
            hint="build the native libraries: pip install -e . (or scripts/setup)",
        ) from error
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
    function.restype = None
    return function


def _library_path() -> Path:
    # An editable install keeps Python files in the checkout and built ones in site-packages.
    try:
        installed = Path(str(importlib.metadata.distribution("pdx").locate_file(_LIBRARY)))
        if installed.exists():
            return installed
    except importlib.metadata.PackageNotFoundError:
        pass
    return Path(__file__).parent / "native" / "libpdx_progress.so"
