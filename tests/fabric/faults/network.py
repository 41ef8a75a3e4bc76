"""Two hosts on this one: a side in a network namespace each, and a network between that can fail.

The namespaces have no name and end with the sides' processes. Addresses are of the loopback range,
on devices that lead nowhere else: nothing can leave the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from pdx.fabric import FabricOptions
from tests.fabric.sides import Child, RemoteSide

__all__ = ["Cable", "Hosts", "Relay", "inside", "lacks"]

_TOOLS: Final = ("ip", "nsenter", "unshare")
#: The two hosts' addresses; each kind of network has its own.
_CABLE: Final = ("127.9.0.1", "127.9.0.2")
_RELAY: Final = ("127.9.1.1", "127.9.1.2")
#: Addresses of the loopback range may be on other devices only where this allows it.
_ALLOW_LOOPBACK_RANGE = """
cd /proc/sys/net/ipv4/conf
echo 1 > all/route_localnet; echo 1 > default/route_localnet
echo 0 > all/rp_filter; echo 0 > default/rp_filter
"""


def lacks(*, tun: bool = False) -> str | None:
    """Why there can be no such networks here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (iproute2, util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode != 0:
        return f"network namespaces are refused: {tried.stderr.strip()}"
    if tun and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "no /dev/net/tun"
    return None


class Hosts:
    """Two namespaces without a network, and the processes in them, which can be given sides."""

    def __init__(self) -> None:
        self._children = [Child(("unshare", "--net")) for _ in range(2)]
        self._sides: list[RemoteSide] = []
        self.pids = [child.process.pid for child in self._children]
        ours = Path("/proc/self/ns/net").readlink()
        for pid in self.pids:
            while Path(f"/proc/{pid}/ns/net").readlink() == ours:
                time.sleep(0.001)
            inside(pid, _ALLOW_LOOPBACK_RANGE)

    def sides(
        self, network: Cable | Relay, num_bytes: int, **options: Any
    ) -> tuple[RemoteSide, RemoteSide]:
        """A tcp side on each host, bound to its address on the network."""
        for child, address in zip(self._children, network.addresses, strict=True):
            side = RemoteSide(
                "tcp", num_bytes, FabricOptions(**options), bind_host=address, child=child
            )
            self._sides.append(side)
        a, b = self._sides
        return a, b

    def close(self) -> None:
        for side in self._sides:
            side.close()
        for child in self._children:
            child.end()


class Cable:
    """A veth pair: as quick as the kernel, and can be pulled."""

    addresses = _CABLE

    def __init__(self, hosts: Hosts) -> None:
        self._end, other = hosts.pids
        inside(self._end, f"ip link add pdx0 type veth peer name pdx0 netns {other}")
        for pid, address in zip(hosts.pids, _CABLE, strict=True):
            inside(pid, f"ip address add {address}/24 dev pdx0; ip link set pdx0 up")

    def cut(self) -> None:
        inside(self._end, "ip link set pdx0 down")

    def mend(self) -> None:
        inside(self._end, "ip link set pdx0 up")


class Relay:
    """A program between the two that delays, loses, doubles and reorders packets (``relay.py``)."""

    addresses = _RELAY

    def __init__(self, hosts: Hosts) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("relay.py")), *map(str, hosts.pids)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.set()
        for pid, address in zip(hosts.pids, _RELAY, strict=True):
            inside(pid, f"ip address add {address}/24 dev pdx1; ip link set pdx1 mtu 9000 up")

    def set(self, **conditions: float) -> dict[str, int]:
        """What holds from now on (``relay.Conditions``); returns what was done so far."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(conditions) + "\n")
        self._process.stdin.flush()
        done: dict[str, int] = json.loads(self._process.stdout.readline())
        return done

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


def inside(pid: int, script: str) -> None:
    """Run a shell script in the network namespace of a process."""
    subprocess.run(["nsenter", "--net", "--target", str(pid), "sh", "-ec", script], check=True)
