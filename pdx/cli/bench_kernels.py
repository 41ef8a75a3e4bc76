"""`pdx bench kernels`: GPU kernels measured beside other libraries; without a GPU, their bounds.

Measuring is a process of its own (`pdx.lab.kernels`), which prints JSON; this one needs no torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdx.cli.options import with_settings
from pdx.cli.output import status_line
from pdx.cli.tables import Table, print_tables
from pdx.config.resolve import Settings
from pdx.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from pdx.cli.kernel_floors import Gpu, Static, Work

__all__ = ["kernels", "measured_table"]


@with_settings()
def kernels(
    settings: Settings,
    offline: Annotated[
        bool, typer.Option("--offline", help="Without a GPU: lower bounds, no times.")
    ] = False,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only ops whose names begin so: decode, linear.")
    ] = "",
    toy: Annotated[
        bool, typer.Option("--toy", help="Measure small shapes, to try it out.")
    ] = False,
    gpu: Annotated[
        str,
        typer.Option(
            metavar="a100|h100|h200|b200", help="With --offline: whose data sheet bounds the work."
        ),
    ] = "h200",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure GPU kernels beside torch's and, where installed, FlashInfer's and FlashAttention's.

    Times are medians, with a cleared L2 cache; bandwidth is a share of what a copy reaches in the
    same run. With --offline, nothing is timed: what kernels must move and compute at least.
    """
    if offline:
        if toy:
            raise ConfigError("--toy is of measuring, which --offline does not")
        _show_bounds(gpu, only, as_json=as_json)
        return
    about, rows = _measured(only, toy=toy)
    if as_json:
        sys.stdout.write(json.dumps(about | {"rows": rows}) + "\n")
    else:
        print_tables([measured_table(about, rows)])
    failed = [row for row in rows if row["failure"] is not None]
    for row in failed:
        status_line(f"{row['op']}, {row['shape']}: {row['failure']}")
    if failed:
        raise WorkerError(f"{len(failed)} of {len(rows)} cases failed")


def _measured(only: str, *, toy: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What on, and the rows of the cases."""
    command = [sys.executable, "-m", "pdx.lab.kernels", "--only", only, *(["--toy"] * toy)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = list(_told(process.stdout))
    if not lines:
        raise WorkerError(f"measuring ended with status {process.returncode} before it began")
    about, *rows = lines
    if "error" in about:
        raise ConfigError(about["error"], hint=about["hint"])
    if not rows:
        raise ConfigError(f"--only {only}: no op begins so")
    return about, rows


def _told(stdout: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in stdout:
        told = json.loads(line)
        if sys.stderr.isatty() and "op" in told:
            status_line(f"{told['op']}: {told['shape']}")
        yield told


def measured_table(about: dict[str, Any], rows: list[dict[str, Any]]) -> Table:
    """Ours in microseconds; others in multiples of ours: above 1, ours is faster."""
    names = list(dict.fromkeys(name for row in rows for name in (*row["others"], *row["notes"])))
    notes = [
        f"{name}: {note}"
        for name, note in dict.fromkeys(n for row in rows for n in row["notes"].items())
    ]
    return Table(
        title=f"{about['gpu']}, a copy has {about['copy_gb_per_s']:.0f} GB/s",
        columns=("op", "shape", "us", "of copy", "TFLOPS", *(f"{name} x" for name in names)),
        rows=tuple(_cells(row, names) for row in rows),
        note="; ".join(["x: time over ours, above 1 ours is faster", *notes]),
        texts=(1,),
    )


def _cells(row: dict[str, Any], names: list[str]) -> tuple[str, ...]:
    times, others = row["times"], row["others"]
    if times is None:
        return (row["op"], row["shape"], "failed", *("-" for _ in range(2 + len(names))))
    ratios = (f"{others[name] / times['median']:.2f}" if name in others else "-" for name in names)
    tflops = f"{row['tflops']:.1f}" if row["tflops"] else "-"
    figures = f"{times['median']:.1f}", f"{row['of_copy']:.0%}", tflops
    return (row["op"], row["shape"], *figures, *ratios)


def _show_bounds(gpu: str, only: str, *, as_json: bool) -> None:
    from pdx.cli.kernel_floors import GPUS, floors, static_figures

    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu}: it can be {', '.join(GPUS)}")
    chosen = GPUS[gpu]
    work = [each for each in floors() if each.op.startswith(only) and each.runs_on(chosen)]
    static = [each for each in static_figures(chosen) if each.launch.startswith(only)]
    if not work and not static:
        raise ConfigError(f"--only {only}: no op begins so")
    if as_json:
        sys.stdout.write(json.dumps(_as_json(chosen, work, static)) + "\n")
    else:
        tables = [_floor_table(chosen, work), _static_table(chosen, static)]
        print_tables([table for table in tables if table.rows])


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
        texts=(1,),
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
