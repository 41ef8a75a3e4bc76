"""`pdx bench kernels`: what the GPU kernels must move and compute, and what their code shows."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from pdx.cli.options import with_settings
from pdx.cli.tables import Table, print_tables
from pdx.config.resolve import Settings
from pdx.errors import ConfigError

if TYPE_CHECKING:
    from pdx.cli.kernel_floors import Gpu, Static, Work

__all__ = ["kernels"]


@with_settings()
def kernels(
    settings: Settings,
    offline: Annotated[
        bool, typer.Option("--offline", help="Without a GPU: lower bounds, no times.")
    ] = False,
    gpu: Annotated[
        str, typer.Option(metavar="a100|h100|h200|b200", help="Whose data sheet bounds the work.")
    ] = "h200",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what attention kernels must do at least on a GPU: bytes, operations, registers.

    Times are lower bounds from a data sheet, never measurements. In a checkout with a GPU,
    bench/kernels/bench_attention.py measures.
    """
    from pdx.cli.kernel_floors import GPUS, floors, static_figures

    if not offline:
        raise ConfigError(
            "measuring kernels is not a command yet",
            hint="ask for --offline, or run bench/kernels/bench_attention.py on a GPU",
        )
    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu}: it can be {', '.join(GPUS)}")
    chosen, work = GPUS[gpu], list(floors())
    static = list(static_figures(chosen))
    if as_json:
        sys.stdout.write(json.dumps(_as_json(chosen, work, static)) + "\n")
    else:
        print_tables([_floor_table(chosen, work), _static_table(chosen, static)])


def _as_json(gpu: Gpu, work: list[Work], static: list[Static]) -> dict[str, object]:
    rows = [
        asdict(each) | {"memory_us": each.memory_us(gpu), "math_us": each.math_us(gpu)}
        for each in work
    ]
    return {"gpu": asdict(gpu), "floors": rows, "compiled": [asdict(each) for each in static]}


def _floor_table(gpu: Gpu, work: list[Work]) -> Table:
    rows = [
        (
            each.op,
            each.shape,
            f"{each.num_bytes / 1e6:.1f}",
            f"{each.flops / 1e9:.1f}",
            "memory" if each.memory_us(gpu) > each.math_us(gpu) else "math",
            f"{max(each.memory_us(gpu), each.math_us(gpu)):.1f}",
        )
        for each in work
    ]
    return Table(
        title=f"At least, on {gpu.name}",
        columns=("op", "shape", "MB", "GFLOP", "bound by", "us"),
        rows=tuple(rows),
        note="lower bounds: bytes at the data sheet's bandwidth or operations at its rate",
    )


def _static_table(gpu: Gpu, static: list[Static]) -> Table:
    rows = [
        (
            each.launch,
            str(each.registers),
            f"{each.shared_bytes / 1024:.0f}",
            str(each.warps),
            str(each.blocks_per_sm),
            str(each.loop_instructions) if each.loop_instructions else "-",
            "-" if each.issue_to_memory is None else f"{each.issue_to_memory:.2f}",
        )
        for each in static
    ]
    return Table(
        title=f"Compiled for sm_{gpu.arch}",
        columns=("launch", "registers", "shared KiB", "warps", "blocks", "loop", "issue/memory"),
        rows=tuple(rows),
        note="issue/memory: cycles to issue a loop over cycles of its loads; above 1, memory waits",
    )
