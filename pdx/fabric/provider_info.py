"""What the loaded libfabric offers on this host: its providers, their domains and limits.

Reads the text that ``fi_tostr`` makes of each ``fi_info``, so no structure of libfabric is mirrored
here; a field that a version does not print is None. For people to read: the core asks libfabric
itself.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pdx.errors import FabricError
from pdx.fabric.native_library import load_libfabric

__all__ = ["ProviderInfo", "built_in_providers", "parse_info", "provider_infos"]

_API_VERSION = (1 << 16) | 17
#: FI_PROV_ATTR_ONLY: one entry for each provider that is built in, with or without a device.
_NAMES_ONLY = 1 << 54
#: FI_TYPE_INFO.
_INFO = 0
_NO_DATA = 61
_LINE = re.compile(r"^( *)(\w+):(?: (.*))?$")
_UNLIMITED = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderInfo:
    """One provider with reliable datagram endpoints and remote writes. Sizes in bytes."""

    name: str
    version: str | None
    #: Interfaces or devices, such as eth0 or rdmap79s0-rdm.
    domains: tuple[str, ...]
    #: None: not told, or as good as unlimited.
    max_msg_bytes: int | None
    inject_bytes: int | None
    #: Operations in flight per endpoint.
    tx_entries: int | None
    rx_entries: int | None
    #: Pieces of local memory in one write.
    iov_limit: int | None
    #: Pieces of remote memory in one write.
    rma_iov_limit: int | None
    #: Size of the immediate that comes with a write; pdx needs 4.
    cq_data_bytes: int | None
    mr_key_bytes: int | None
    #: What registered memory asks for, such as FI_MR_VIRT_ADDR.
    mr_mode: tuple[str, ...]


def built_in_providers() -> tuple[str, ...]:
    """Names of all providers in the library, utilities and hooks left out.

    Raises:
        FabricError: no libfabric can be loaded, or it refuses.
    """
    names = [_flat(text).get("fi_fabric_attr.prov_name", "") for text in _infos(_NAMES_ONLY)]
    return tuple(
        dict.fromkeys(name for name in names if name and not name.startswith(("ofi_", "off_")))
    )


def provider_infos() -> tuple[ProviderInfo, ...]:
    """What can be opened here, one entry per provider.

    Raises:
        FabricError: no libfabric can be loaded, or it refuses.
    """
    found: dict[str, ProviderInfo] = {}
    for text in _infos(0):
        info = parse_info(text)
        if info is None:
            continue
        known = found.get(info.name)
        domains = (*(known.domains if known else ()), *info.domains)
        found[info.name] = replace(known or info, domains=tuple(dict.fromkeys(domains)))
    return tuple(found.values())


def parse_info(text: str) -> ProviderInfo | None:
    """One printed fi_info; None where it is of no use for remote writes."""
    flat = _flat(text)
    name = flat.get("fi_fabric_attr.prov_name")
    if (
        not name
        or flat.get("fi_ep_attr.type") != "FI_EP_RDM"
        or "FI_RMA" not in _list(flat, "caps")
    ):
        return None
    return ProviderInfo(
        name=name,
        version=flat.get("fi_fabric_attr.prov_version"),
        domains=tuple(filter(None, [flat.get("fi_domain_attr.name")])),
        max_msg_bytes=_number(flat, "fi_ep_attr.max_msg_size"),
        inject_bytes=_number(flat, "fi_tx_attr.inject_size"),
        tx_entries=_number(flat, "fi_tx_attr.size"),
        rx_entries=_number(flat, "fi_rx_attr.size"),
        iov_limit=_number(flat, "fi_tx_attr.iov_limit"),
        rma_iov_limit=_number(flat, "fi_tx_attr.rma_iov_limit"),
        cq_data_bytes=_number(flat, "fi_domain_attr.cq_data_size"),
        mr_key_bytes=_number(flat, "fi_domain_attr.mr_key_size"),
        mr_mode=tuple(_list(flat, "fi_domain_attr.mr_mode")),
    )


def _infos(flags: int) -> Iterator[str]:
    """The text of each entry that fi_getinfo gives without hints."""
    library = ctypes.CDLL(load_libfabric().path)
    library.fi_tostr.restype = ctypes.c_char_p
    library.fi_tostr.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.fi_freeinfo.argtypes = [ctypes.c_void_p]
    library.fi_freeinfo.restype = None
    first = ctypes.c_void_p()
    code = library.fi_getinfo(
        ctypes.c_uint32(_API_VERSION),
        None,
        None,
        ctypes.c_uint64(flags),
        None,
        ctypes.byref(first),
    )
    if code == -_NO_DATA:
        return
    if code != 0:
        raise FabricError(f"fi_getinfo refuses: error {-code}", code=-code)
    try:
        entry = first.value
        while entry:
            yield (library.fi_tostr(entry, _INFO) or b"").decode(errors="replace")
            # `next` is the first member, in every version.
            entry = ctypes.c_void_p.from_address(entry).value
    finally:
        library.fi_freeinfo(first)


def _flat(text: str) -> dict[str, str]:
    """Lines that are nested by indentation: names such as caps and fi_ep_attr.type."""
    values: dict[str, str] = {}
    section, depth = "", 0
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        indent, name, value = len(found[1]), found[2], found[3]
        if not value and name.startswith("fi_"):
            section, depth = ("" if name == "fi_info" else name), indent
        elif value is not None:
            inside = section if indent > depth else ""
            values.setdefault(f"{inside}.{name}" if inside else name, value.strip())
    return values


def _list(flat: dict[str, str], key: str) -> list[str]:
    return [part.strip() for part in flat.get(key, "").strip("[] ").split(",") if part.strip()]


def _number(flat: dict[str, str], key: str) -> int | None:
    text = flat.get(key, "")
    return int(text) if text.isdecimal() and int(text) < _UNLIMITED else None
