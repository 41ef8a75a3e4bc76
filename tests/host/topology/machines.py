"""Machines written down as text, one file each in shapes/, and expanded to folders as sysfs has
them: devices below the bridges they hang on, symbolic links from buses and classes.

A line is a name and facts; its indentation says what it hangs on:

    node 0 socket=0 cpus=0-55,112-167 distances=10,21
    smt 112                     hardware threads of a core: n and n + 112
    allowed 0-7                 this process's CPUs (all by default)
    quota 4                     the cgroup's CPUs
    default eth0                interface of the default route
    pci0000:15 numa=0           a host bridge; its NUMA node holds for all below
      0000:15:01.0 bridge
        0000:16:00.0 gpu model=H100 [hidden]
        0000:17:00.0 nic id=15b3:1021 rdma=mlx5_0 rate=400 link=InfiniBand [net=ib0] [state=DOWN]
                                    [withheld: no device file]
        0000:18:00.0 nic id=8086:15f3 net=eth0 mbps=1000
    virtual bond0 mbps=200000   an interface without a device
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SHAPES = Path(__file__).parent / "shapes"
NAMES = sorted(path.stem for path in SHAPES.glob("*.txt"))


@dataclass
class Line:
    """One line: its name, its bare words, its facts."""

    name: str
    words: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)


def expand(shape: str, root: Path) -> Path:
    """Write the machine that shapes/<shape>.txt describes below ``root``."""
    return expand_text((SHAPES / f"{shape}.txt").read_text(), root)


def expand_text(text: str, root: Path) -> Path:
    writer = _Writer(root)
    above: list[tuple[int, Path, str]] = []
    for indent, line in _parse(text):
        while above and above[-1][0] >= indent:
            above.pop()
        if line.name.startswith("pci"):
            folder = root / "sys/devices" / line.name
            above.append((indent, folder, line.facts.get("numa", "-1")))
        elif above and line.name.count(":") == 2:
            _, parent, numa = above[-1]
            numa = line.facts.get("numa", numa)
            above.append((indent, parent / line.name, numa))
            writer.device(parent / line.name, line, numa)
        else:
            writer.fact(line)
    writer.finish()
    return root


def _parse(text: str) -> Iterator[tuple[int, Line]]:
    for raw in text.splitlines():
        parts = shlex.split(raw, comments=True)
        if not parts:
            continue
        line = Line(parts[0])
        for part in parts[1:]:
            name, equals, value = part.partition("=")
            if equals:
                line.facts[name] = value
            else:
                line.words.append(name)
        yield len(raw) - len(raw.lstrip()), line


class _Writer:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._smt = 0
        self._nodes: list[Line] = []
        self._num_gpus = 0
        self._num_verbs = 0

    def fact(self, line: Line) -> None:
        match line.name:
            case "node":
                self._nodes.append(line)
            case "smt":
                self._smt = int(line.words[0])
            case "allowed":
                self._put("proc/self/status", f"Name:\tx\nCpus_allowed_list:\t{line.words[0]}\n")
            case "quota":
                self._put("sys/fs/cgroup/cpu.max", f"{int(line.words[0]) * 100000} 100000")
            case "default":
                header = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
                route = f"{line.words[0]} 00000000 010200C0 0003 0 0 0 00000000 0 0 0\n"
                self._put("proc/net/route", header + route)
            case "virtual":
                folder = self._root / "sys/devices/virtual/net" / line.words[0]
                self._interface(folder, line)
            case other:
                raise ValueError(f"unknown line {other!r}")

    def device(self, folder: Path, line: Line, numa: str) -> None:
        kind = line.words[0]
        default_id = {"bridge": "1000:c030", "gpu": "10de:2330"}.get(kind, "")
        vendor, device = line.facts.get("id", default_id).split(":")
        classes = {"bridge": "0x060400", "gpu": "0x030200", "nic": "0x020000"}
        self._put(folder / "class", line.facts.get("class", classes.get(kind, "0x010802")))
        self._put(folder / "vendor", f"0x{vendor}")
        self._put(folder / "device", f"0x{device}")
        self._put(folder / "numa_node", numa)
        self._put(folder / "current_link_speed", "32.0 GT/s PCIe")
        self._put(folder / "max_link_speed", "32.0 GT/s PCIe")
        self._put(folder / "current_link_width", line.facts.get("width", "16"))
        self._put(folder / "max_link_width", "16")
        self._link("sys/bus/pci/devices", folder)
        if kind == "gpu":
            self._gpu(line)
        if "rdma" in line.facts:
            self._rdma(folder, line)
        if "net" in line.facts:
            self._interface(folder / "net" / line.facts["net"], line)
        if "physfn" in line.facts:
            (folder / "physfn").symlink_to(f"../{line.facts['physfn']}")

    def _gpu(self, line: Line) -> None:
        minor = self._num_gpus
        self._num_gpus += 1
        if "hidden" in line.words:
            return
        text = f"Model: \t\t {line.facts.get('model', 'NVIDIA')}\nDevice Minor: \t {minor}\n"
        self._put(f"proc/driver/nvidia/gpus/{line.name}/information", text)
        self._put(f"dev/nvidia{minor}", "")

    def _rdma(self, folder: Path, line: Line) -> None:
        name = line.facts["rdma"]
        port = folder / "infiniband" / name / "ports/1"
        self._put(port / "rate", f"{line.facts['rate']} Gb/sec (4X NDR)")
        self._put(port / "link_layer", line.facts.get("link", "InfiniBand"))
        self._put(port / "state", f"4: {line.facts.get('state', 'ACTIVE')}")
        self._link("sys/class/infiniband", folder / "infiniband" / name)
        verbs = folder / "infiniband_verbs" / f"uverbs{self._num_verbs}"
        self._put(verbs / "ibdev", name)
        self._link("sys/class/infiniband_verbs", verbs)
        if "withheld" not in line.words:
            self._put(f"dev/infiniband/uverbs{self._num_verbs}", "")
        self._num_verbs += 1

    def _interface(self, folder: Path, line: Line) -> None:
        self._put(folder / "speed", line.facts.get("mbps", "-1"))
        self._put(folder / "type", line.facts.get("type", "1"))
        self._put(folder / "flags", "0x1003")
        self._put(folder / "operstate", line.facts.get("operstate", "up"))
        self._link("sys/class/net", folder)

    def finish(self) -> None:
        cpus: set[int] = set()
        for line in self._nodes:
            folder = self._root / f"sys/devices/system/node/node{line.words[0]}"
            self._put(folder / "cpulist", line.facts.get("cpus", ""))
            if "distances" in line.facts:
                self._put(folder / "distance", line.facts["distances"].replace(",", " "))
            own = _numbers(line.facts.get("cpus", ""))
            cpus |= own
            for cpu in own:
                self._cpu(cpu, line.facts.get("socket", "0"))
        if cpus:
            self._put("sys/devices/system/cpu/online", ",".join(map(str, sorted(cpus))))

    def _cpu(self, cpu: int, socket: str) -> None:
        folder = self._root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        first = cpu % self._smt if self._smt else cpu
        siblings = f"{first},{first + self._smt}" if self._smt else str(cpu)
        self._put(folder / "thread_siblings_list", siblings)
        self._put(folder / "physical_package_id", socket)

    def _put(self, path: str | Path, text: str) -> None:
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")

    def _link(self, folder: str, target: Path) -> None:
        link = self._root / folder / target.name
        link.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * len(Path(folder).parts)
        link.symlink_to(up + str(target.relative_to(self._root)))


def _numbers(text: str) -> set[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first:
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers
