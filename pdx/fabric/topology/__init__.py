from pdx.fabric.topology.distance import Distance
from pdx.fabric.topology.machine import Core, Gpu, Machine, Nic, NicKind, NumaNode, PciPlace
from pdx.fabric.topology.pairing import DomainGroup, NicChoice
from pdx.fabric.topology.topology import Topology, plan_topology, read_topology
from pdx.fabric.topology.workers import WorkerCore

__all__ = [
    "Core",
    "Distance",
    "DomainGroup",
    "Gpu",
    "Machine",
    "Nic",
    "NicChoice",
    "NicKind",
    "NumaNode",
    "PciPlace",
    "Topology",
    "WorkerCore",
    "plan_topology",
    "read_topology",
]
