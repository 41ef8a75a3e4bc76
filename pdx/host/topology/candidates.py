"""Which NICs may carry pages at all: those that work here, of one kind, network and speed. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from pdx.config.providers import Provider
from pdx.host.topology.machine import Machine, Nic

__all__ = ["Candidates", "choose_candidates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The NICs to deal out, and why the others are not among them."""

    nics: tuple[Nic, ...]
    left_out: tuple[tuple[Nic, str], ...]


def choose_candidates(machine: Machine) -> Candidates:
    """EFA before verbs before TCP; of these the NICs that together are fastest.

    A write is striped over a GPU's NICs, so they must be alike: the slowest would hold up the rest,
    and a storage NIC may be on a network that no peer reaches.
    """
    for kind in (Provider.EFA, Provider.VERBS):
        usable = [nic for nic in machine.nics if nic.kind is kind and nic.problem is None]
        if usable:
            nics = _fastest_together(usable)
            return Candidates(nics=nics, left_out=_reasons(machine, nics))
    nics = tuple(_tcp(machine)[:1])
    return Candidates(nics=nics, left_out=_reasons(machine, nics))


def _fastest_together(usable: list[Nic]) -> tuple[Nic, ...]:
    alike: dict[tuple[str | None, float], list[Nic]] = defaultdict(list)
    for nic in usable:
        alike[nic.link_layer, nic.rate_gbps or 0.0].append(nic)
    (layer, rate), best = max(
        alike.items(),
        key=lambda each: (each[0][1] * len(each[1]), each[0][1], each[0][0] or ""),
    )
    return tuple(best) if rate else tuple(n for n in usable if n.link_layer == layer)


def _tcp(machine: Machine) -> list[Nic]:
    """Interfaces, best first: the default route's, what is up and fast, loopback."""
    usable = [n for n in machine.nics if n.kind is Provider.TCP and n.problem is None]

    def order(nic: Nic) -> tuple[bool, bool, bool, float, str]:
        return (
            nic.name != machine.default_interface,
            nic.link_layer == "loopback",
            nic.place is None,
            -(nic.rate_gbps or 0),
            nic.name,
        )

    return sorted(usable, key=order)


def _reasons(machine: Machine, chosen: tuple[Nic, ...]) -> tuple[tuple[Nic, str], ...]:
    rdma = {name for nic in machine.nics if nic.kind is not Provider.TCP for name in nic.interfaces}
    return tuple(
        (nic, _reason(nic, chosen))
        for nic in machine.nics
        # The interface of an RDMA device is no other NIC.
        if nic not in chosen and not (nic.kind is Provider.TCP and nic.name in rdma)
    )


def _reason(nic: Nic, chosen: tuple[Nic, ...]) -> str:
    if nic.problem is not None:
        return nic.problem
    best = chosen[0]
    if nic.kind is not best.kind:
        return f"{best.kind.value} is better than {nic.kind.value}"
    if best.kind is Provider.TCP:
        return f"{best.name} carries TCP"
    if nic.link_layer != best.link_layer:
        return f"it speaks {nic.link_layer}, the chosen ones {best.link_layer}"
    return f"{_rate(nic)}, the chosen ones {_rate(best)}"


def _rate(nic: Nic) -> str:
    return "speed unknown" if nic.rate_gbps is None else f"{nic.rate_gbps:g} Gb/s"
