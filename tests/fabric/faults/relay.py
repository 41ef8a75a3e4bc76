"""A wire between two network namespaces that delays, loses, doubles and reorders packets: what the
kernel's netem does, where it has none.

Run as a script with two process ids: opens a TUN device ``pdx1`` in the namespace of each, and
carries packets between until its input ends. Each line of input is a JSON object of Conditions;
each is answered by a line that counts what was done so far.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 1, 0x1000
_MAX_PACKET_BYTES = 65536
#: Packets that wait to leave, each way; a full queue drops, as a router's does.
_MAX_QUEUED = 2000
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    delay_s: float = 0.0
    #: Probabilities of a packet.
    loss: float = 0.0
    double: float = 0.0
    reorder: float = 0.0
    #: Bits a second, each way; 0: as fast as it goes.
    bits_per_s: float = 0.0


@dataclass(slots=True)
class Way:
    """One direction: what came in and when it leaves."""

    out: int
    queue: list[tuple[float, int, bytes]] = field(default_factory=list)
    #: When the packets before this one have left.
    free_at: float = 0.0


class Wire:
    def __init__(self, devices: list[int], rng: random.Random) -> None:
        a, b = devices
        self.ways = {a: Way(out=b), b: Way(out=a)}
        self.done: Counter[str] = Counter()
        self.conditions = Conditions()
        self._rng = rng
        self._serial = itertools.count()

    def take(self, device: int) -> None:
        """A packet that a namespace sends."""
        way, now, such = self.ways[device], time.monotonic(), self.conditions
        packet = os.read(device, _MAX_PACKET_BYTES)
        if self._happens("lost", such.loss):
            return
        for _ in range(2 if self._happens("doubled", such.double) else 1):
            if len(way.queue) >= _MAX_QUEUED:
                self.done["overflowed"] += 1
                continue
            if such.bits_per_s:
                way.free_at = max(way.free_at, now) + len(packet) * 8 / such.bits_per_s
            leaves = max(way.free_at, now) + such.delay_s
            if self._happens("reordered", such.reorder):
                leaves = now  # past those that wait
            heapq.heappush(way.queue, (leaves, next(self._serial), packet))

    def give(self, now: float) -> float:
        """Let go what is due. Returns when the next is, at most a tenth of a second later."""
        soonest = now + 0.1
        for way in self.ways.values():
            while way.queue and way.queue[0][0] <= now:
                packet = heapq.heappop(way.queue)[2]
                try:
                    os.write(way.out, packet)
                    self.done["carried"] += 1
                except OSError:  # the device there is not up yet
                    self.done["refused"] += 1
            if way.queue:
                soonest = min(soonest, way.queue[0][0])
        return soonest

    def _happens(self, what: str, probability: float) -> bool:
        happens = self._rng.random() < probability
        self.done[what] += happens
        return happens


def open_tun(pid: int, ours: int) -> int:
    """A TUN device in the namespace of a process."""
    theirs = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    _enter(theirs)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"pdx1", _IFF_TUN | _IFF_NO_PI))
    _enter(ours)
    os.close(theirs)
    return device


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def main() -> None:
    ours = os.open("/proc/self/ns/net", os.O_RDONLY)
    devices = [open_tun(int(pid), ours) for pid in sys.argv[1:]]
    wire = Wire(devices, random.Random(1))
    control = sys.stdin.fileno()
    pending = b""
    while True:
        now = time.monotonic()
        wait_s = max(0.0, wire.give(now) - now)
        readable = select.select([control, *devices], [], [], wait_s)[0]
        for device in readable:
            if device != control:
                wire.take(device)
                continue
            more = os.read(control, 4096)
            if not more:
                return
            *lines, pending = (pending + more).split(b"\n")
            for line in lines:
                wire.conditions = Conditions(**json.loads(line))
                print(json.dumps(wire.done), flush=True)


if __name__ == "__main__":
    main()
