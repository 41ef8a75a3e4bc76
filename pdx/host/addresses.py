"""The addresses that this host's interfaces have. Asks the kernel; sends nothing."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostAddress", "host_addresses"]

_SIOCGIFCONF = 0x8912
#: struct ifreq: a name and, for this call, an IPv4 socket address.
_IFREQ = struct.Struct("16s4x4s16x")
_MAX_ADDRESSES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAddress:
    """One address of one interface."""

    interface: str
    address: ipaddress.IPv4Address | ipaddress.IPv6Address

    @property
    def reaches_out(self) -> bool:
        """Whether other hosts may reach it: it is no loopback or link-local address."""
        return not (self.address.is_loopback or self.address.is_link_local)


def host_addresses() -> tuple[HostAddress, ...]:
    """All addresses of interfaces that are up, IPv4 first, in the kernel's order."""
    return (*_ipv4(), *_ipv6())


def _ipv4() -> Iterator[HostAddress]:
    room = array.array("B", bytes(_IFREQ.size * _MAX_ADDRESSES))
    request = bytearray(struct.pack("iP", len(room), room.buffer_info()[0]))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCGIFCONF, request)
    num_bytes = struct.unpack_from("i", request)[0]
    for name, packed in _IFREQ.iter_unpack(room.tobytes()[:num_bytes]):
        interface = name.partition(b"\0")[0].decode(errors="replace")
        # An address with a label of its own (eth0:1) is still one of the interface.
        yield HostAddress(
            interface=interface.partition(":")[0], address=ipaddress.IPv4Address(packed)
        )


def _ipv6() -> Iterator[HostAddress]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return
    for line in lines:
        fields = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(fields[0]))
        yield HostAddress(interface=fields[-1], address=address)
