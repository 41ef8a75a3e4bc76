"""libpdx_cpu_ops.so in ctypes' words: its functions take addresses of contiguous tensors.

Loaded once, when the first op of a rank runs: after torch, whose OpenMP it then shares. The address
of a tensor is valid during the call because the caller holds the tensor.
"""

from __future__ import annotations

import ctypes
import functools
import re
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from pdx.errors import ConfigError
from pdx.installed import native_library

__all__ = ["NATIVE_DTYPES", "has_amx", "native_ops"]

#: What the library computes in; other dtypes take the reference.
NATIVE_DTYPES = frozenset({torch.float32, torch.bfloat16})

#: Functions that return an int; the others return nothing.
_ASKED = frozenset({"pdx_chunk_attention", "pdx_decode_attention", "pdx_has_amx"})
_SIGNATURES = {
    "pdx_linear": [c_void_p] * 5 + [c_int64] * 3,
    "pdx_has_amx": [],
    "pdx_linear_amx": [c_void_p] * 5 + [c_int64] * 3,
    "pdx_rms_norm": [c_void_p] * 3 + [c_int64] * 2 + [c_float, c_int],
    "pdx_rope": [c_void_p] * 4 + [c_int64] * 3 + [c_int],
    "pdx_kv_append": [c_void_p] * 5 + [c_int64] * 4,
    "pdx_chunk_attention": [c_void_p] * 5 + [c_int64] * 6 + [c_float],
    "pdx_decode_attention": [c_void_p] * 8 + [c_int64] * 5 + [c_float, c_int],
}


@functools.cache
def native_ops() -> ctypes.CDLL:
    """The library, with its signatures set.

    Raises:
        ConfigError: it is not built.
    """
    _share_openmp()
    try:
        library = ctypes.CDLL(str(native_library("kernels/cpu/native/libpdx_cpu_ops.so")))
    except OSError as error:
        raise ConfigError(
            f"cannot load libpdx_cpu_ops.so: {error}",
            hint="build the native libraries: pip install -e . (or scripts/setup)",
        ) from error
    for name, argtypes in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = argtypes
        function.restype = c_int if name in _ASKED else None
    return library


@functools.cache
def has_amx() -> bool:
    """Whether this process may use AMX, for bfloat16; asks the kernel for it once."""
    return bool(native_ops().pdx_has_amx())


def _share_openmp() -> None:
    """Make the symbols of torch's GNU OpenMP visible to the library, which is not linked to one: a
    wheel of torch carries its own copy, under a name that differs between builds, and a second
    OpenMP in the process would start a second set of threads.
    """
    mapped = re.findall(r"(/\S*/libgomp[^/\s]*\.so\S*)$", Path("/proc/self/maps").read_text(), re.M)
    for path in mapped[:1] or ["libgomp.so.1"]:
        try:
            ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise ConfigError(
                f"cannot load an OpenMP runtime: {error}",
                hint="install the system's libgomp (Debian: libgomp1)",
            ) from error
