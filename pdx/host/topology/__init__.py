from pdx.host.topology.distance import Distance
from pdx.host.topology.machine import Core, Gpu, Machine, Nic, NumaNode, PciPlace
from pdx.host.topology.pairing import DomainGroup, NicChoice
from pdx.host.topology.topology import Topology, plan_topology, read_topology
from pdx.host.topology.workers import WorkerCore

__all__ = [
    "Core",
    "Distance",
    "DomainGroup",
    "Gpu",
    "Machine",
    "Nic",
    "NicChoice",
    "NumaNode",
    "PciPlace",
    "Topology",
    "WorkerCore",
    "plan_topology",
    "read_topology",
]
