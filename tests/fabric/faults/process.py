"""Faults in a side's own process, for ``Side.run()``."""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "congestion_controls",
    "default_congestion_control",
    "limit_descriptors",
    "reset_connections",
    "resident_bytes",
]

_LIBC = ctypes.CDLL(None)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def reset_connections(side: Any) -> int:
    """Break every TCP connection of the process: its peers get a reset. Returns how many."""
    return sum(_reset(connection) for connection in _connections())


def congestion_controls(side: Any) -> set[str]:
    """What paces the process's TCP connections, listeners aside."""
    return {_congestion_control(connection) for connection in _connections()}


def default_congestion_control() -> str:
    """What a connection gets that asks for none."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def limit_descriptors(side: Any, spare: int | None) -> None:
    """Let the process open so many more; None: as many as it may."""
    soft = hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if spare is not None:
        used = set(_descriptors())
        free = (number for number in itertools.count() if number not in used)
        soft = next(itertools.islice(free, spare, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def resident_bytes(side: Any) -> int:
    """Memory of the process that is its own."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * _PAGE_BYTES


def _connections() -> Iterator[socket.socket]:
    """Copies of the TCP connections. What is no socket is known by its name, because a worker may
    open a file of its own at this moment.
    """
    for entry in Path("/proc/self/fd").iterdir():
        if _target(entry).startswith("socket:"):
            with socket.socket(fileno=os.dup(int(entry.name))) as sock:
                if _is_connection(sock):
                    yield sock


def _is_connection(sock: socket.socket) -> bool:
    if sock.type != socket.SOCK_STREAM or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        sock.getpeername()
    except OSError:  # it listens
        return False
    return True


def _target(entry: Path) -> str:
    """Empty where it is closed by now."""
    try:
        return str(entry.readlink())
    except FileNotFoundError:
        return ""


def _descriptors() -> list[int]:
    numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    return [number for number in numbers if _is_open(number)]


def _is_open(number: int) -> bool:
    """False for the one that listed them."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _reset(connection: socket.socket) -> bool:
    """Connecting it to no address is what resets it."""
    nowhere = struct.pack("=H14x", socket.AF_UNSPEC)
    return bool(_LIBC.connect(connection.fileno(), nowhere, len(nowhere)) == 0)


def _congestion_control(connection: socket.socket) -> str:
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0").decode()
