"""What holds for every machine: nobody goes without, nobody gets more, order does not matter."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from pdx.config.providers import Provider
from pdx.host.topology import Gpu, Machine, Nic, NumaNode, PciPlace, plan_topology
from pdx.host.topology.assignment import assign
from pdx.host.topology.machine import Core, PcieLink

_LINK = PcieLink(gts=None, width=None, max_gts=None, max_width=None)
_NODES = tuple(
    NumaNode(
        idx=idx,
        socket=idx,
        cpus=tuple(range(idx * 40, idx * 40 + 40)),
        distances=((0, 10 if idx == 0 else 21), (1, 21 if idx == 0 else 10)),
    )
    for idx in range(2)
)
_CORES = tuple(
    Core(cpus=(cpu,), numa_node=node.idx, socket=node.idx) for node in _NODES for cpu in node.cpus
)


def place(index: int, where: tuple[int, int, int | None]) -> PciPlace:
    host, switch, numa = where
    bridges = (f"pci0000:{host:02x}", f"0000:{host:02x}:01.0", f"0000:{host:02x}:{switch:02x}.1")
    return PciPlace(
        address=f"0000:{index:02x}:00.0",
        bridges=bridges[: switch + 1],
        numa_node=numa,
        link=_LINK,
    )


def build(gpus: list[PciPlace], nics: list[PciPlace]) -> Machine:
    return Machine(
        gpus=tuple(Gpu(place=each, model=None, minor=None, problem=None) for each in gpus),
        nics=tuple(
            Nic(
                name=f"mlx5_{n}",
                kind=Provider.VERBS,
                place=each,
                model=None,
                rate_gbps=400.0,
                link_layer="InfiniBand",
                interfaces=(),
                problem=None,
                hidden=False,
            )
            for n, each in enumerate(nics)
        ),
        numa_nodes=_NODES,
        cores=_CORES,
        allowed_cpus=frozenset(range(80)),
        cpu_quota=None,
        default_interface=None,
        notes=(),
    )


places = st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from([None, 0, 1]))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    where = draw(st.lists(places, min_size=1, max_size=22))
    num_gpus = draw(st.integers(1, min(8, len(where))))
    indices = draw(st.permutations(range(len(where))))
    every = [place(index, each) for index, each in zip(indices, where, strict=True)]
    return build(every[:num_gpus], every[num_gpus:])


@given(machines())
@settings(max_examples=150, deadline=None)
def test_every_gpu_is_served_and_equally(machine: Machine) -> None:
    topology = plan_topology(machine)
    groups = [[choice.nic.name for choice in group.nics] for group in topology.groups]
    uses = Counter(name for group in groups for name in group)
    sizes = {len(group) for group in groups}
    if not machine.nics:
        assert sizes == {0}
        return
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    if len(machine.nics) >= len(machine.gpus):
        assert max(uses.values()) == 1
    else:
        assert len(uses) == len(machine.nics)
        assert max(uses.values()) - min(uses.values()) <= 1
    left_out = [nic.name for nic, _ in topology.left_out]
    assert sorted([*uses, *left_out]) == sorted(nic.name for nic in machine.nics)


@given(machines(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_order_of_enumeration_does_not_matter(machine: Machine, shuffle: random.Random) -> None:
    gpus, nics = list(machine.gpus), list(machine.nics)
    shuffle.shuffle(gpus)
    shuffle.shuffle(nics)
    mixed = dataclasses.replace(machine, gpus=tuple(gpus), nics=tuple(nics))
    first, second = plan_topology(machine), plan_topology(mixed)
    assert (first.groups, first.workers, first.left_out) == (
        second.groups,
        second.workers,
        second.left_out,
    )


@given(machines())
@settings(max_examples=100, deadline=None)
def test_no_exchange_of_two_nics_brings_both_nearer(machine: Machine) -> None:
    from pdx.host.topology.distance import measure

    nodes = {node.idx: node for node in machine.numa_nodes}

    def farthest_first(pairs: list[tuple[Gpu, Nic]]) -> list[int]:
        ranks = [measure(gpu.place, nic.place, nodes).distance.rank for gpu, nic in pairs]
        return sorted(ranks, reverse=True)

    topology = plan_topology(machine)
    pairs = [(g.gpu, c.nic) for g in topology.groups for c in g.nics if g.gpu is not None]
    for (gpu_a, nic_a), (gpu_b, nic_b) in itertools.combinations(pairs, 2):
        now = farthest_first([(gpu_a, nic_a), (gpu_b, nic_b)])
        assert now <= farthest_first([(gpu_a, nic_b), (gpu_b, nic_a)])


@given(
    st.integers(1, 4).flatmap(
        lambda rows: st.integers(rows, 5).flatmap(
            lambda columns: st.lists(
                st.lists(st.integers(0, 9), min_size=columns, max_size=columns),
                min_size=rows,
                max_size=rows,
            )
        )
    )
)
@settings(max_examples=150, deadline=None)
def test_assignment_is_the_cheapest(costs: list[list[int]]) -> None:
    columns = assign(costs)
    assert len(set(columns)) == len(costs)
    cheapest = min(
        sum(costs[row][column] for row, column in enumerate(choice))
        for choice in itertools.permutations(range(len(costs[0])), len(costs))
    )
    assert sum(costs[row][column] for row, column in enumerate(columns)) == cheapest


def test_nothing_is_assigned_where_there_is_nothing() -> None:
    assert assign([]) == []


def test_a_ninth_nic_is_spare() -> None:
    gpus = [place(n, (0, 2, 0)) for n in range(8)]
    nics = [place(0x20 + n, (0, 2, 0)) for n in range(9)]
    topology = plan_topology(build(gpus, nics))
    assert [len(group.nics) for group in topology.groups] == [1] * 8
    assert [nic.name for nic, _ in topology.left_out] == ["mlx5_8"]


def test_one_gpu_does_not_reach_beyond_its_switch() -> None:
    nics = [place(0x20, (0, 2, 0)), place(0x21, (1, 2, 0)), place(0x22, (2, 2, 1))]
    topology = plan_topology(build([place(1, (0, 2, 0))], nics))
    assert [choice.nic.name for choice in topology.groups[0].nics] == ["mlx5_0"]


def test_nics_are_shared_out_evenly_also_where_they_sit_together() -> None:
    gpus = [place(n, (0 if n < 3 else 1, 2, 0)) for n in range(4)]
    nics = [place(0x20, (0, 2, 0)), place(0x21, (1, 2, 0))]
    topology = plan_topology(build(gpus, nics))
    assert Counter(g.nics[0].nic.name for g in topology.groups) == {"mlx5_0": 2, "mlx5_1": 2}
