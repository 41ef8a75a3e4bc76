from pdx.fabric.simulated.conditions import Clock, Conditions
from pdx.fabric.simulated.fabric import SimulatedFabric
from pdx.fabric.simulated.imm import Imm, ImmLayout
from pdx.fabric.simulated.memory import AddressSpace
from pdx.fabric.simulated.network import SimulatedNetwork
from pdx.fabric.simulated.nodes import Landing
from pdx.fabric.simulated.transfer import Piece, Write, WriteShape

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
