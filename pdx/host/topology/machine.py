"""What a machine consists of, as far as this process may see it. Frozen; no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from pdx.config.providers import Provider

__all__ = ["Core", "Gpu", "Machine", "Nic", "NumaNode", "PciPlace", "PcieLink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """A PCIe link as it runs now, and what the device could do. None: not told."""

    gts: float | None
    width: int | None
    max_gts: float | None
    max_width: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PciPlace:
    """Where a device sits."""

    #: Such as 0000:18:00.0.
    address: str
    #: From the host bridge (such as pci0000:15) down over all PCI bridges, without the device
    #: itself. Empty: not told.
    bridges: tuple[str, ...]
    #: The device's, else that of the nearest bridge that tells one, else the only one there is.
    numa_node: int | None
    link: PcieLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """An NVIDIA GPU of the machine; also one that this process may not use."""

    place: PciPlace
    model: str | None
    #: The n of /dev/nvidian.
    minor: int | None
    #: What keeps this process from using it; None: nothing that can be seen from here.
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One way out of the machine: a port of an RDMA device, or a network interface."""

    #: The RDMA device (mlx5_0, with :2 for its second port), the interface (eth0), or the PCI
    #: address of what offers neither here.
    name: str
    kind: Provider
    #: None: no PCI device is behind it (loopback, bonds, software RDMA).
    place: PciPlace | None
    #: Such as "ConnectX-7"; the PCI ids of what we have no name for.
    model: str | None
    rate_gbps: float | None
    #: InfiniBand, Ethernet, Unspecified (EFA); loopback for lo.
    link_layer: str | None
    #: Network interfaces of the same PCI function.
    interfaces: tuple[str, ...]
    #: What keeps this process from using it; None: nothing that can be seen from here.
    problem: str | None
    #: Whether the problem is that its device file is kept from this process, as in a container
    #: that was given some of the machine's NICs.
    hidden: bool

    @property
    def address(self) -> str | None:
        """The PCI address."""
        return None if self.place is None else self.place.address

    @property
    def numa_node(self) -> int | None:
        """The NUMA node, where it has one and tells."""
        return None if self.place is None else self.place.numa_node


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """A NUMA node; one without CPUs is memory only (Grace-Hopper shows a GPU's memory so)."""

    idx: int
    #: None: not told, or no CPU.
    socket: int | None
    #: Online CPUs.
    cpus: tuple[int, ...]
    #: The firmware's distance to each node, 10 to itself.
    distances: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """A physical core with its online hardware threads."""

    cpus: tuple[int, ...]
    numa_node: int | None
    socket: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything that was read. All lists are in the order of addresses, names or numbers."""

    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    numa_nodes: tuple[NumaNode, ...]
    cores: tuple[Core, ...]
    #: CPUs that this process may run on.
    allowed_cpus: frozenset[int]
    #: How many CPUs' time the cgroup grants; None: no limit, or not told.
    cpu_quota: float | None
    #: The interface of the default route.
    default_interface: str | None
    #: What could not be read, and what follows from that.
    notes: tuple[str, ...]
