"""NICs: ports of RDMA devices, network interfaces, and PCI functions that offer neither here."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from pdx.config.providers import Provider
from pdx.host.topology.machine import Nic
from pdx.host.topology.pci import PciFunction, owner
from pdx.host.topology.sysfs import entries, read_int, read_number, read_text

__all__ = ["read_default_interface", "read_nics"]

_AMAZON, _MELLANOX = 0x1D0F, 0x15B3
#: Class of network controllers; EFA says "other" of itself on some instances.
_NETWORK = 0x02
_MODELS = {
    0x1013: "ConnectX-4",
    0x1015: "ConnectX-4 Lx",
    0x1017: "ConnectX-5",
    0x1019: "ConnectX-5 Ex",
    0x101B: "ConnectX-6",
    0x101D: "ConnectX-6 Dx",
    0x101E: "ConnectX virtual function",
    0x101F: "ConnectX-6 Lx",
    0x1021: "ConnectX-7",
    0x1023: "ConnectX-8",
    0xA2D6: "BlueField-2",
    0xA2DC: "BlueField-3",
}
_LOOPBACK = "lo"
#: IFF_UP of an interface's flags.
_UP = 0x1
_ARPHRD_LOOPBACK = 772


def read_nics(root: Path, functions: dict[str, PciFunction]) -> tuple[Nic, ...]:
    """All of them, by kind, PCI address and name."""
    interfaces: dict[str | None, list[Path]] = defaultdict(list)
    for entry in entries(root / "sys/class/net"):
        interfaces[owner(entry)].append(entry)
    nics: list[Nic] = []
    for entry in entries(root / "sys/class/infiniband"):
        nics += _rdma_ports(root, entry, functions, interfaces)
    virtual = _replaced_functions(nics, functions)
    nics = [_with_problem(nic, virtual.get(nic.address or "")) for nic in nics]
    for address, several in interfaces.items():
        nics += [_interface(entry, functions.get(address or "")) for entry in several]
    offered = {nic.address for nic in nics}
    nics += [_idle(each) for each in functions.values() if _is_unused_nic(each, offered)]
    order = (Provider.EFA, Provider.VERBS, Provider.TCP)
    return tuple(sorted(nics, key=lambda n: (order.index(n.kind), n.address or "~", n.name)))


def read_default_interface(root: Path) -> str | None:
    """The interface of the default route: IPv4's with the least metric, else IPv6's."""
    routes: list[tuple[int, int, str]] = []
    for line in (read_text(root / "proc/net/route") or "").splitlines()[1:]:
        words = line.split()
        if len(words) >= 8 and words[1] == words[7] == "00000000" and words[6].isdecimal():
            routes.append((4, int(words[6]), words[0]))
    for line in (read_text(root / "proc/net/ipv6_route") or "").splitlines():
        words = line.split()
        # Unreachable defaults lead to lo.
        if len(words) == 10 and words[0] == "0" * 32 and words[1] == "00" and words[9] != _LOOPBACK:
            routes.append((6, int(words[5], 16), words[9]))
    return min(routes)[2] if routes else None


def _rdma_ports(
    root: Path,
    entry: Path,
    functions: dict[str, PciFunction],
    interfaces: dict[str | None, list[Path]],
) -> list[Nic]:
    address = owner(entry)
    function = functions.get(address or "")
    ports = [port for port in entries(entry / "ports") if port.name.isdecimal()]
    withheld = _device_file_problem(root, entry.name)
    software = None if function is not None else "software RDMA: no PCI device is behind it"
    return [
        Nic(
            name=entry.name if port.name == "1" else f"{entry.name}:{port.name}",
            kind=_kind(function) if function is not None else Provider.VERBS,
            place=None if function is None else function.place,
            model=None if function is None else _model(function),
            rate_gbps=read_number(port / "rate"),
            link_layer=read_text(port / "link_layer"),
            interfaces=tuple(each.name for each in interfaces.get(address, [])) if address else (),
            problem=software or withheld or _port_problem(port),
            hidden=withheld is not None,
        )
        for port in ports or [entry / "ports/1"]
    ]


def _device_file_problem(root: Path, device: str) -> str | None:
    """What is wrong with the device file that libfabric opens."""
    for entry in entries(root / "sys/class/infiniband_verbs"):
        if read_text(entry / "ibdev") == device:
            node = root / "dev/infiniband" / entry.name
            if not node.exists():
                return f"/dev/infiniband/{entry.name} is missing"
            if not os.access(node, os.R_OK | os.W_OK):
                return f"/dev/infiniband/{entry.name} may not be opened by this user"
            return None
    return "no verbs device file belongs to it (is ib_uverbs loaded?)"


def _port_problem(port: Path) -> str | None:
    state = read_text(port / "state")
    if state is None or "ACTIVE" in state:
        return None
    return f"its port is {state.partition(':')[2].strip() or state}"


def _replaced_functions(nics: list[Nic], functions: dict[str, PciFunction]) -> dict[str, str]:
    """Virtual functions whose physical one can be used as well: the two share one port."""
    usable = {nic.address for nic in nics if nic.problem is None}
    return {
        address: f"a virtual function of {each.physical}"
        for address, each in functions.items()
        if each.physical in usable and each.physical is not None
    }


def _interface(entry: Path, function: PciFunction | None) -> Nic:
    mbps = read_int(entry / "speed")
    is_loopback = read_int(entry / "type") == _ARPHRD_LOOPBACK
    return Nic(
        name=entry.name,
        kind=Provider.TCP,
        place=None if function is None else function.place,
        model=None if function is None else _model(function),
        rate_gbps=mbps / 1000 if mbps is not None and mbps > 0 else None,
        link_layer="loopback" if is_loopback else None,
        interfaces=(entry.name,),
        problem=_interface_problem(entry),
        hidden=False,
    )


def _interface_problem(entry: Path) -> str | None:
    flags = read_int(entry / "flags", 16)
    if flags is not None and not flags & _UP:
        return "it is switched off"
    state = read_text(entry / "operstate")
    return f"its link is {state}" if state in ("down", "lowerlayerdown", "notpresent") else None


def _is_unused_nic(function: PciFunction, offered: set[str | None]) -> bool:
    is_nic = function.class_code >> 8 == _NETWORK or _is_efa(function)
    return is_nic and function.place.address not in offered


def _idle(function: PciFunction) -> Nic:
    return Nic(
        name=function.place.address,
        kind=_kind(function) if function.vendor in (_AMAZON, _MELLANOX) else Provider.TCP,
        place=function.place,
        model=_model(function),
        rate_gbps=None,
        link_layer=None,
        interfaces=(),
        problem="it shows neither an RDMA device nor a network interface here",
        hidden=False,
    )


def _with_problem(nic: Nic, problem: str | None) -> Nic:
    return nic if problem is None or nic.problem else replace(nic, problem=problem)


def _is_efa(function: PciFunction) -> bool:
    # 0xefa0 to 0xefa3 so far.
    return function.vendor == _AMAZON and function.device >> 4 == 0xEFA


def _kind(function: PciFunction) -> Provider:
    if _is_efa(function):
        return Provider.EFA
    # Amazon's other one (ENA) carries IP alone.
    return Provider.TCP if function.vendor == _AMAZON else Provider.VERBS


def _model(function: PciFunction) -> str:
    if _is_efa(function):
        return f"EFA (0x{function.device:x})"
    if function.vendor == _AMAZON and function.device & 0xFFF0 == 0xEC20:
        return "ENA"
    known = _MODELS.get(function.device) if function.vendor == _MELLANOX else None
    return known or f"{function.vendor:04x}:{function.device:04x}"
