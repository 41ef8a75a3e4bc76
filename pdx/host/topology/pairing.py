"""Which NICs serve which GPU, and why. Pure: the same machine gives the same answer, in whatever
order its parts were found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdx.config.providers import Provider
from pdx.host.topology.assignment import assign
from pdx.host.topology.candidates import choose_candidates
from pdx.host.topology.distance import Distance, Way, measure
from pdx.host.topology.machine import Gpu, Machine, Nic

__all__ = ["DomainGroup", "NicChoice", "Pairing", "pair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NicChoice:
    """A NIC of a group, and how far it is from the group's GPU."""

    nic: Nic
    distance: Distance
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainGroup:
    """The NICs that serve one GPU; without a GPU, those that serve host memory."""

    gpu: Gpu | None
    #: Empty where no NIC can be used at all.
    nics: tuple[NicChoice, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """A group for each GPU of the machine, or one for host memory."""

    groups: tuple[DomainGroup, ...]
    left_out: tuple[tuple[Nic, str], ...]


def pair(machine: Machine) -> Pairing:
    """Deal the machine's best NICs out to its GPUs.

    Every GPU gets equally many, for the slowest rank holds up all: as many as there are, without
    reaching farther than a first NIC must. No NIC serves two GPUs unless there are fewer NICs than
    GPUs; then each serves equally many, give or take one. GPUs that this process may not use are
    dealt in, so that two processes of one machine come to answers that fit together; but not where
    a container was given its own share of the NICs.
    """
    candidates = choose_candidates(machine)
    nics = sorted(candidates.nics, key=_order)
    if not machine.gpus:
        host = DomainGroup(gpu=None, nics=_for_host(nics), why=_why_host(nics))
        return Pairing(groups=(host,), left_out=candidates.left_out)
    gpus = _gpus_to_serve(machine, nics)
    nodes = {node.idx: node for node in machine.numa_nodes}
    paths = [[measure(gpu.place, nic.place, nodes) for nic in nics] for gpu in gpus]
    dealt = _deal(paths) if nics else [[] for _ in gpus]
    groups = [
        DomainGroup(
            gpu=gpu,
            nics=tuple(_choice(nics[n], paths[g][n]) for n in dealt[g]),
            why=_why(g, dealt, gpus, nics, paths),
        )
        for g, gpu in enumerate(gpus)
    ]
    groups += [
        DomainGroup(gpu=gpu, nics=(), why="another process's GPU; some NICs are hidden from here")
        for gpu in machine.gpus
        if gpu not in gpus
    ]
    groups.sort(key=lambda group: group.gpu.place.address if group.gpu else "")
    used = {n for each in dealt for n in each}
    spare = [(nic, _why_spare(len(gpus))) for n, nic in enumerate(nics) if n not in used]
    left_out = sorted((*candidates.left_out, *spare), key=lambda each: _order(each[0]))
    return Pairing(groups=tuple(groups), left_out=tuple(left_out))


def _order(nic: Nic) -> tuple[str, str]:
    return nic.address or "~", nic.name


def _gpus_to_serve(machine: Machine, nics: list[Nic]) -> list[Gpu]:
    gpus = sorted(machine.gpus, key=lambda gpu: gpu.place.address)
    ours = [gpu for gpu in gpus if gpu.problem is None]
    has_own_share = (
        any(nic.hidden for nic in machine.nics if nic.kind is nics[0].kind) if nics else False
    )
    return ours if ours and has_own_share else gpus


def _deal(paths: list[list[Way]]) -> list[list[int]]:
    """NIC indices for each GPU."""
    num_gpus, num_nics = len(paths), len(paths[0])
    if num_nics < num_gpus:
        return _share(_costs(paths, num_nics, num_gpus))
    best: list[list[int]] = []
    reach = None
    for each in range(1, num_nics // num_gpus + 1):
        dealt = _deal_equally(_costs(paths, each, 1), each)
        farthest = max(paths[g][n].distance.rank for g in range(num_gpus) for n in dealt[g])
        if reach is not None and farthest > reach:
            break
        best, reach = dealt, farthest
    return best


def _costs(paths: list[list[Way]], num_nics_each: int, num_gpus_each: int) -> list[list[int]]:
    """What each pair costs: one that is farther costs more than all nearer ones together; then
    short ways are better; then the first GPU gets the first NICs.

    ``num_nics_each`` NICs go to ``num_gpus_each`` GPUs.
    """
    num_gpus, num_nics = len(paths), len(paths[0])
    pairs = max(num_gpus, num_nics)
    longest = max(path.length for row in paths for path in row)
    places = pairs * (num_gpus * num_nics) ** 2 + 1
    lengths = pairs * longest * places + places
    return [
        [
            lengths * (pairs + 1) ** path.distance.rank
            + places * path.length
            # Convex, so that equal ones are dealt in order.
            + (g * num_nics_each - n * num_gpus_each) ** 2
            for n, path in enumerate(row)
        ]
        for g, row in enumerate(paths)
    ]


def _deal_equally(costs: list[list[int]], each: int) -> list[list[int]]:
    rows = [row for row in costs for _ in range(each)]
    columns = assign(rows)
    return [sorted(columns[g * each : (g + 1) * each]) for g in range(len(costs))]


def _share(costs: list[list[int]]) -> list[list[int]]:
    """Fewer NICs than GPUs: one each, every NIC for equally many GPUs, give or take one."""
    num_gpus, num_nics = len(costs), len(costs[0])
    full = num_gpus // num_nics
    # A NIC's last seat is only taken where all others are full.
    last_seat = num_gpus * max(max(row) for row in costs) + 1
    rows = [[*row * full, *(cost + last_seat for cost in row)] for row in costs]
    return [[column % num_nics] for column in assign(rows)]


def _choice(nic: Nic, path: Way) -> NicChoice:
    return NicChoice(nic=nic, distance=path.distance, why=path.why)


def _for_host(nics: Iterable[Nic]) -> tuple[NicChoice, ...]:
    why = "it serves host memory"
    return tuple(NicChoice(nic=nic, distance=Distance.UNKNOWN, why=why) for nic in nics)


def _why_host(nics: list[Nic]) -> str:
    if not nics:
        return "no GPU, and no network interface that works: shm alone, for peers on this host"
    if nics[0].link_layer == "loopback":
        return "no GPU, and no network but loopback: peers on this host"
    if nics[0].kind is Provider.TCP:
        return f"no GPU and no RDMA device: tcp over {nics[0].name}, shm for peers on this host"
    return f"no GPU: all {_described(nics)} serve host memory, shm for peers on this host"


def _why(
    g: int, dealt: list[list[int]], gpus: list[Gpu], nics: list[Nic], paths: list[list[Way]]
) -> str:
    own = dealt[g]
    if not own:
        return "no NIC can be used here: only peers on this host"
    reasons = list(dict.fromkeys(paths[g][n].why for n in own))
    text = f"{_described([nics[n] for n in own])}, {'; '.join(reasons)}"
    sharers = [gpus[i].place.address for i, each in enumerate(dealt) if i != g and each == own]
    return f"{text}; shared with GPU {', '.join(sharers)}" if sharers else text


def _described(nics: list[Nic]) -> str:
    rate = nics[0].rate_gbps
    speed = "of unknown speed" if rate is None else f"of {rate:g} Gb/s"
    if nics[0].kind is Provider.TCP:
        return f"tcp over {nics[0].name} {speed}"
    return f"{len(nics)} x {nics[0].model or nics[0].kind.value} {speed}"


def _why_spare(num_gpus: int) -> str:
    if num_gpus == 1:
        return "spare: it is farther from the GPU than the chosen ones"
    return f"spare: {num_gpus} GPUs get equally many, and none reaches farther than it must"
