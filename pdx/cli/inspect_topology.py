"""`pdx inspect topology`: what the machine consists of, and which NIC serves which GPU.

Reads sysfs only: no rights, no torch, no libfabric.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdx.cli.options import with_settings
from pdx.cli.output import status_line
from pdx.config.resolve import Settings
from pdx.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from rich.tree import Tree

    from pdx.cli.topology_labels import Labels
    from pdx.host.topology import Topology
    from pdx.host.topology.tree import Branch

__all__ = ["topology"]


@with_settings()
def topology(
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a drawing to this file.")
    ] = None,
    sysfs: Annotated[
        Path,
        typer.Option(metavar="ROOT", hidden=True, help="Read sys, proc and dev below this folder."),
    ] = Path("/"),
) -> None:
    """Show GPUs, NICs and cores, and which NIC and core serve which GPU, with reasons."""
    from pdx.host.topology import read_topology

    if svg is not None and svg.suffix.lower() != ".svg":
        raise ConfigError(f"{svg}: the drawing is .svg", hint=f"{svg.with_suffix('.svg')}")
    if not sysfs.is_dir():
        raise ConfigError(f"{sysfs} is no folder", hint="it must hold sys, proc and dev")
    found = read_topology(sysfs)
    if svg is not None:
        _write_svg(found, svg)
    if as_json:
        sys.stdout.write(json.dumps(_as_json(found)) + "\n")
    elif sys.stdout.isatty():
        _print_rich(found)
    else:
        sys.stdout.write("\n".join(_plain_lines(found)) + "\n")


def _write_svg(found: Topology, path: Path) -> None:
    from pdx.cli.topology_svg import draw

    try:
        path.write_text(draw(found), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    status_line(f"drawn to {path}")


def _as_json(found: Topology) -> dict[str, Any]:
    import msgspec

    groups = [
        {
            "gpu": None if group.gpu is None else group.gpu.place.address,
            "usable": group.gpu is None or group.gpu.problem is None,
            "nics": [
                {
                    "name": choice.nic.name,
                    "provider": choice.nic.kind.value,
                    "distance": choice.distance.value,
                    "why": choice.why,
                }
                for choice in group.nics
            ],
            "why": group.why,
            "worker_cpu": worker.cpu,
            "worker_why": worker.why,
        }
        for group, worker in zip(found.groups, found.workers, strict=True)
    ]
    left_out = [{"name": nic.name, "why": why} for nic, why in found.left_out]
    machine: dict[str, Any] = msgspec.to_builtins(found.machine)
    machine["allowed_cpus"] = sorted(found.machine.allowed_cpus)
    return {"groups": groups, "left_out": left_out, "machine": machine}


def _plain_lines(found: Topology) -> list[str]:
    from pdx.cli.topology_labels import Labels
    from pdx.host.topology.tree import machine_tree

    labels = Labels(found)
    lines = []
    for tree in machine_tree(found.machine):
        lines += _plain_branch(tree, labels, 0)
    for title, entries in labels.summary():
        lines += ["", title, *(f"  {entry}" for entry in entries)]
    return lines


def _plain_branch(branch: Branch, labels: Labels, depth: int) -> list[str]:
    lines = ["  " * depth + branch.title]
    devices = [*map(labels.gpu, branch.gpus), *map(labels.nic, branch.nics)]
    lines += ["  " * (depth + 1) + label for label in devices]
    for each in branch.branches:
        lines += _plain_branch(each, labels, depth + 1)
    return lines


def _print_rich(found: Topology) -> None:
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    from pdx.cli.topology_labels import Labels
    from pdx.host.topology.tree import machine_tree

    labels, console = Labels(found), Console(highlight=False)
    for branch in machine_tree(found.machine):
        tree = Tree(Text(branch.title, style="bold"))
        _grow(tree, branch, labels)
        console.print(tree)
    for title, entries in labels.summary():
        console.print()
        console.print(Text(title, style="bold"))
        for entry in entries:
            console.print(Text(f"  {entry}"))


def _grow(tree: Tree, branch: Branch, labels: Labels) -> None:
    from rich.text import Text

    for gpu in branch.gpus:
        tree.add(Text(labels.gpu(gpu), style="green" if gpu.problem is None else "dim"))
    for nic in branch.nics:
        tree.add(Text(labels.nic(nic), style="cyan" if labels.serves(nic) else "dim"))
    for each in branch.branches:
        _grow(tree.add(Text(each.title)), each, labels)
