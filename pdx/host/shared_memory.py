"""Whether /dev/shm has room for links over shm. Reads; takes nothing."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from pdx.config.providers import Provider

__all__ = ["SHM_HINT", "SHM_LINK_BYTES", "shm_lack", "shm_room", "size_text"]

#: The core opens no shm link with less room than this (native/providers/shm.cpp).
SHM_LINK_BYTES = 16 << 20
SHM_HINT = "make it larger: docker run --shm-size 1g, or mount -o remount,size=1g /dev/shm"


def shm_lack(providers: Collection[str]) -> str | None:
    """Why no link over shm can be opened here; None: one can.

    Args:
        providers: what libfabric offers here. It offers no shm either where /dev/shm is too small.
    """
    room = shm_room(Path("/dev/shm"))
    if room is None:
        return "there is no /dev/shm"
    size, free = room
    if free < SHM_LINK_BYTES:
        return (
            f"/dev/shm has {size_text(free)} of {size_text(size)} free, "
            f"a link over shm may need {size_text(SHM_LINK_BYTES)}"
        )
    return None if Provider.SHM in providers else "this libfabric offers no shm"


def shm_room(folder: Path) -> tuple[int, int] | None:
    """Size and free bytes of /dev/shm; None: there is none."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def size_text(num_bytes: int) -> str:
    """For people."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"
