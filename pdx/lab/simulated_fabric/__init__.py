from pdx.lab.simulated_fabric.conditions import Clock, Conditions
from pdx.lab.simulated_fabric.fabric import SimulatedFabric
from pdx.lab.simulated_fabric.imm import Imm, ImmLayout
from pdx.lab.simulated_fabric.memory import AddressSpace
from pdx.lab.simulated_fabric.network import SimulatedNetwork
from pdx.lab.simulated_fabric.nodes import Landing
from pdx.lab.simulated_fabric.transfer import Piece, Write, WriteShape

__all__ = [
    "AddressSpace",
    "Clock",
    "Conditions",
    "Imm",
    "ImmLayout",
    "Landing",
    "Piece",
    "SimulatedFabric",
    "SimulatedNetwork",
    "Write",
    "WriteShape",
]
